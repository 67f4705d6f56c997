"""When an export came in is part of what the log has of it."""

import time

from tests.support.clocks import eventually
from tests.support.sidecars import call_export, metric, running_sidecar
from tests.support.step_exports import make_export

STEPS = 50
HOUR_S = 3_600


class SenderReports:
    """Of a server that was started minutes before the test: each says what it did in a second, in turn."""

    def __init__(self):
        self._begin_ns = time.time_ns() - 250 * 10**9
        self._second = 0

    def say(self, sidecar, instance="honest", *, ahead_s=0):
        first = 1 + self._second * STEPS
        begin_ns = self._begin_ns + ahead_s * 10**9
        request = make_export(1, steps_per_span=STEPS, first_step=first, instance=instance, begin_ns=begin_ns)
        (span,) = request.resource_spans[0].scope_spans[0].spans
        span.span_id = first.to_bytes(4, "big") + sum(instance.encode()).to_bytes(4, "big")
        call_export(sidecar.grpc_port, request.SerializeToString())

    def go_on(self, sidecar, seconds):
        for _ in range(seconds):
            self.say(sidecar)
            self._second += 1


def count(sidecar, series):
    return metric(sidecar.http_port, f"tracefit_{series}")


LEARNED = 'rows_total{outcome="learned",target="step_time"}'
LEFT_OUT = 'decode_spans_total{outcome="out_of_range"}'


def test_when_an_export_came_in_is_kept_with_it_in_the_log(tmp_path):
    """What is learned after a kill is what would have been learned without one, an hour ahead or not."""
    senders = SenderReports()
    with running_sidecar(tmp_path, DURABILITY="log") as sidecar:
        sidecar.pipeline.process = lambda _: None  # as if it had been killed first
        senders.go_on(sidecar, 80)
        senders.say(sidecar, "ahead", ahead_s=HOUR_S)
    with running_sidecar(tmp_path, DURABILITY="log") as sidecar:
        eventually(lambda: count(sidecar, LEARNED) > 40 * STEPS)
        eventually(lambda: count(sidecar, LEFT_OUT) == 1)
