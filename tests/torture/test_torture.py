"""The short versions; ``make torture`` and ``make stress`` are the long ones."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from collector.telemetry.table import ACCEPTED, DECODED_SPANS, SPANS
from tests.support.sidecars import call_export, running_sidecar
from tests.support.step_exports import make_export
from tests.torture import kills

SECONDS = float(os.environ.get("STRESS_S", "0.5"))


def test_kills_and_bad_disks_lose_nothing_and_repeat_nothing(tmp_path):
    report = kills.run(tmp_path / "life", kills=4, seed=1, exports=120, pause_s=0.01)
    assert report["repeats"] > 0, "the kills were noticed"
    assert report["rows"] > 2 * 2 * (1200 - 1) - 10


def ask(url, body=None):
    request = urllib.request.Request(url, body, {"Content-Type": "application/x-protobuf"} if body else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read(), answer.headers


def again_and_again(act, closing):
    """Until the sidecar closes; who is refused for lack of room comes again."""
    for turn in itertools.count():
        try:
            act(turn)
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            code = error.code() if isinstance(error, grpc.RpcError) else getattr(error, "code", None)
            if code in (503, grpc.StatusCode.RESOURCE_EXHAUSTED):
                continue
            if not closing.is_set():
                raise
            return


def produce(send, acknowledged, number, turn):
    send(make_export(2, first_step=1 + 20 * turn, instance=f"engine-{number}").SerializeToString())
    acknowledged.append(number)


def scrape(url, _):
    assert b"# TYPE tracefit_" in ask(f"{url}/metrics")[0], "half a page"


def pull(url, pulled, seen, _):
    body, headers = ask(f"{url}/snapshot")
    assert hashlib.sha256(body).hexdigest().startswith(headers["ETag"].strip('"')), "torn snapshot"
    seen.append(json.loads(body)["generation"])
    assert seen == sorted(seen)
    pulled.set()


@pytest.fixture
def _often_switched():
    """Threads change places 500 times as often as usual."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("_often_switched")
def test_everybody_at_once_neither_deadlocks_nor_tears_a_snapshot(tmp_path):
    """Also not when it is shut down in the middle; every acknowledged span was learned from."""
    settings = {"DURABILITY": "log", "CHECKPOINT_INTERVAL_S": "0.3", "QUEUE_MIB": "0.2"}
    with running_sidecar(tmp_path, **settings) as sidecar, ThreadPoolExecutor(16) as pool:
        closing, pulled, acknowledged = threading.Event(), threading.Event(), []
        pages = f"http://127.0.0.1:{sidecar.http_port}"
        over_http = partial(ask, f"http://127.0.0.1:{sidecar.otlp_http_port}/v1/traces")
        over_grpc = partial(call_export, sidecar.grpc_port, timeout_s=20, wait=False)
        acts = [partial(produce, over_http if n > 4 else over_grpc, acknowledged, n) for n in range(8)]
        acts += [partial(scrape, pages)] * 2 + [partial(pull, pages, pulled, []) for _ in range(3)]
        busy = [pool.submit(again_and_again, act, closing) for act in acts]
        closing.wait(SECONDS)
        assert pulled.wait(60), "a busy machine learns its first rows later, but it does"
        closing.set()
        assert sidecar.stop(), "nothing acknowledged may be lost"
        for each in busy:
            each.result(100)
        value = sidecar.metrics.value
        accepted = value(SPANS, "grpc", ACCEPTED) + value(SPANS, "http", ACCEPTED)
        assert value(DECODED_SPANS, ACCEPTED) == accepted >= 2 * len(acknowledged) > 0
