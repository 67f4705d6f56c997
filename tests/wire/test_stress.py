"""Producers, scrapers, pullers and a shutdown at once; ``make stress`` goes on for longer."""

import http.client
import itertools
import json
import os
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from collector.telemetry.table import ACCEPTED, DECODED_SPANS, SPANS
from tests.support.clocks import eventually
from tests.support.pipelines import value_of
from tests.support.sidecars import call_export, running_sidecar
from tests.support.step_exports import make_export

SECONDS = float(os.environ.get("STRESS_S", "0.5"))


@pytest.fixture
def _often_switched():
    """Threads change places 500 times as often as usual."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual_s)


def ask(port, path, body=None):
    headers = {"Content-Type": "application/x-protobuf"} if body else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read(), answer.headers


def again_and_again(act, number, closing):
    """Until the sidecar closes; who is refused for lack of room, or asks before the first rows, comes again."""
    for turn in itertools.count():
        try:
            act(number, turn)
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            code = error.code() if isinstance(error, grpc.RpcError) else getattr(error, "code", None)
            if code in (503, grpc.StatusCode.RESOURCE_EXHAUSTED):
                continue
            if not closing.is_set():
                raise
            return


@pytest.mark.usefixtures("_often_switched")
def test_everybody_at_once_neither_deadlocks_nor_tears_a_snapshot(tmp_path):
    """Also not when it is shut down in the middle; every acknowledged span was learned from."""
    closing, newest, acknowledged = threading.Event(), [0] * 6, []

    def produce(number, turn):
        body = make_export(2, first_step=1 + 20 * turn, instance=f"engine-{number}").SerializeToString()
        if number % 2:
            ask(sidecar.otlp_http_port, "/v1/traces", body)
        else:
            call_export(sidecar.grpc_port, body, timeout_s=20, wait=False)
        acknowledged.append(number)

    def read(number, _turn):
        assert b"# TYPE tracefit_" in ask(sidecar.http_port, "/metrics")[0], "half a page"
        body, _ = ask(sidecar.http_port, "/snapshot")
        assert newest[number] <= json.loads(body)["generation"], "never goes back"
        newest[number] = json.loads(body)["generation"]

    settings = {"DURABILITY": "log", "CHECKPOINT_INTERVAL_S": "0.3", "QUEUE_MIB": "0.2"}
    with running_sidecar(tmp_path, **settings) as sidecar, ThreadPoolExecutor(12) as pool:
        busy = [pool.submit(again_and_again, act, number, closing) for act in (produce, read) for number in range(6)]
        closing.wait(SECONDS)
        eventually(lambda: max(newest))
        closing.set()
        assert sidecar.halt(), "nothing acknowledged may be lost"
        for each in busy:
            each.result(100)
        value = partial(value_of, sidecar.metrics)
        accepted = value(SPANS, "grpc", ACCEPTED) + value(SPANS, "http", ACCEPTED)
        assert value(DECODED_SPANS, ACCEPTED) == accepted >= 2 * len(acknowledged) > 0
