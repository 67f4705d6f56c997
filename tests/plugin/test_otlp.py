"""Over OTLP: what the receiver of a sidecar understands, and what becomes of it where there is none."""

import os
from unittest import mock

from collector.telemetry import Counts
from tests.plugin.conftest import scheduler_to
from tests.plugin.fakes import Request, drive
from tests.plugin.receiver import Receiver
from tests.plugin.test_settings import COMPANY
from tests.support.clocks import eventually
from tests.support.toy_spans import telemetry_in


def test_a_live_run_reaches_the_sidecar_with_steps_and_facts_and_no_company_secret(receiver):
    own = {"TRACEFITVLLM_HEADERS": "authorization=Bearer%20x", "OTEL_SERVICE_NAME": "b\udcff"}
    with mock.patch.dict(os.environ, COMPANY | own):
        scheduler = scheduler_to(receiver.url)
        scheduler.add_request(Request("a", 30, 4))
        drive(scheduler, 6)
        scheduler.shutdown()
    eventually(lambda: receiver.steps() == [1, 2, 3, 4, 5, 6])
    for span in receiver.spans("vllm.scheduler.step"):
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    resource = receiver.resources()[0]
    assert (resource["vllm.model"], resource["service.name"]) == ("tiny", "b?")
    assert receiver.metadata[0]["authorization"] == "Bearer x"
    assert "api-key" not in receiver.metadata[0]
    counts = Counts()
    read = [one for payload in receiver.traces() for one in telemetry_in(payload, counts)]
    assert sum(len(one.steps) for one in read) == 6


def test_a_minute_without_the_receiver_loses_nothing():
    receiver = Receiver()
    receiver.stop()
    scheduler = scheduler_to(receiver.url)
    scheduler.add_request(Request("a", 30, 40))
    drive(scheduler, 20)
    receiver = Receiver(receiver.port)
    try:
        eventually(lambda: len(receiver.steps()) == 20)
        assert not scheduler._tracefit.publisher.lost
    finally:
        scheduler.shutdown()
        receiver.stop()
