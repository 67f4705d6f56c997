"""Everybody at once: producers, scrapers, pullers, token reloads, then a shutdown in the middle of it.

    python -X dev -m tests.torture.stress [--seconds 10]

With a thread switch every 10 us and Python's development mode. A deadlock ends in a traceback of every thread.
What must hold: nothing raises; no reader sees a torn snapshot (its ETag is the digest of its bytes, generations never
go back); received = accepted + refused + failed; every acknowledged span was learned from or is in the log.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import http.client
import json
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import grpc

from collector.ingest.otlp_grpc import METHOD
from collector.telemetry.reasons import Transport
from collector.telemetry.table import ACCEPTED_SPANS, DECODED_SPANS, FAILED_SPANS, RECEIVED_SPANS, REFUSED_SPANS
from tests.support.sidecars import running_sidecar
from tests.support.silent_calls import own_channel
from tests.support.step_exports import make_export

HANG_S = 120
TOKEN = "t" * 32


class Crowd:
    """Threads that do one thing until told to stop; what one of them finds wrong ends the run."""

    def __init__(self, sidecar, token_file):
        self.sidecar, self.token_file = sidecar, token_file
        self.stop, self.closing, self.pulled = threading.Event(), threading.Event(), threading.Event()
        self.problems, self.acknowledged = [], [0] * 8
        jobs = [(self.produce_grpc, n) for n in range(5)] + [(self.produce_http, n) for n in range(5, 8)]
        jobs += [(self.scrape, path) for path in ("/metrics", "/readyz", "/healthz")]
        jobs += [(self.pull, {"newest": 0}) for _ in range(3)] + [(self.reload, 0)]
        self.threads = [threading.Thread(target=self._run, args=job, daemon=True) for job in jobs]
        for thread in self.threads:
            thread.start()

    def _run(self, job, about):
        while not self.stop.is_set():
            try:
                job(about)
            except Exception as error:  # noqa: BLE001
                gone = isinstance(error, OSError | http.client.HTTPException | grpc.RpcError)
                if not (self.closing.is_set() and gone):
                    self.problems.append(f"{job.__name__}: {error!r}")
                self.pulled.set()
                return

    def _payload(self, number):
        first = 1 + self.acknowledged[number] * 10
        return make_export(2, steps_per_span=5, first_step=first, instance=f"engine-{number}").SerializeToString()

    def produce_grpc(self, number):
        with own_channel(self.sidecar.grpc_port) as channel:
            while not self.stop.is_set():
                try:
                    metadata = (("authorization", f"Bearer {TOKEN}"),)
                    channel.unary_unary(METHOD)(self._payload(number), timeout=20, metadata=metadata)
                    self.acknowledged[number] += 1
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise

    def _ask(self, port, path, body=None, headers=None):
        """Body and headers of an answer; None while there is none yet."""
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != http.client.SERVICE_UNAVAILABLE:
                raise
            self.stop.wait(0.01)
            return None

    def produce_http(self, number):
        headers = {"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {TOKEN}"}
        taken = self._ask(self.sidecar.otlp_http_port, "/v1/traces", self._payload(number), headers)
        self.acknowledged[number] += taken is not None

    def scrape(self, path):
        answer = self._ask(self.sidecar.http_port, path)
        assert path != "/metrics" or (answer and b"# TYPE tracefit_" in answer[0]), "half a page"

    def pull(self, seen):
        answer = self._ask(self.sidecar.http_port, "/snapshot")
        if answer is not None:
            body, headers = answer
            assert hashlib.sha256(body).hexdigest().startswith(headers["ETag"].strip('"')), "torn snapshot"
            generation = json.loads(body)["generation"]
            assert generation >= seen["newest"], f"generation {generation} after {seen['newest']}"
            seen["newest"] = generation
            self.pulled.set()

    def reload(self, _):
        other = self.token_file.with_suffix(".new")
        other.write_text(TOKEN + "\n")
        other.replace(self.token_file)
        self.stop.wait(0.01)


def accepted_spans(sidecar):
    """Spans accepted over all transports, each of which has its equation."""
    value, accepted = sidecar.metrics.value, 0.0
    for transport in Transport:
        refused = sum(value(REFUSED_SPANS, transport, reason) for reason in dict(REFUSED_SPANS.labels)["reason"])
        assert not value(FAILED_SPANS, transport)
        assert value(RECEIVED_SPANS, transport) == value(ACCEPTED_SPANS, transport) + refused, transport
        accepted += value(ACCEPTED_SPANS, transport)
    return accepted


def run(directory, seconds):
    """Stress; exports acknowledged."""
    (directory / "token").write_text(TOKEN)
    settings = {"CHECKPOINT_INTERVAL_S": "0.3", "QUEUE_MIB": "0.2", "TOKEN_FILE": str(directory / "token")}
    with running_sidecar(directory / "s", DURABILITY="log", **settings) as sidecar:
        crowd = Crowd(sidecar, directory / "token")
        crowd.stop.wait(seconds)
        assert crowd.pulled.wait(HANG_S / 2), "a busy machine learns its first rows later, but it does"
        crowd.closing.set()
        stopped = sidecar.stop()
        crowd.stop.set()
        for thread in crowd.threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), thread
        assert crowd.problems == [], crowd.problems
        assert stopped, "nothing acknowledged may be lost"
        accepted = accepted_spans(sidecar)
        assert sidecar.metrics.value(DECODED_SPANS) == accepted >= 2 * sum(crowd.acknowledged)
        return sum(crowd.acknowledged)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    seconds = parser.parse_args().seconds
    faulthandler.dump_traceback_later(seconds + HANG_S, exit=True)
    sys.setswitchinterval(1e-5)
    with tempfile.TemporaryDirectory() as directory:
        acknowledged = run(Path(directory), seconds)
    print(f"{acknowledged} exports acknowledged, no snapshot torn, no deadlock")


if __name__ == "__main__":
    main()
