"""Everybody at once: producers, scrapers, pullers, token reloads, then a shutdown in the middle of it.

    python -X dev -m tests.torture.stress [--seconds 10] [--seed 1]

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
import random
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import grpc

from collector.app import Sidecar
from collector.ingest.otlp_grpc import METHOD
from collector.runtime.tasks import SystemClock
from collector.telemetry.reasons import Transport
from collector.telemetry.table import ACCEPTED_SPANS, DECODED_SPANS, FAILED_SPANS, RECEIVED_SPANS, REFUSED_SPANS
from tests.support.sidecars import make_config
from tests.support.step_exports import make_export

SWITCH_S = 1e-5
HANG_S = 120
TOKEN = "t" * 32
_GONE = (OSError, http.client.HTTPException, urllib.error.URLError)


class Crowd:
    """Threads that do one thing until told to stop; what one of them finds wrong ends the run."""

    def __init__(self, sidecar, directory, seed) -> None:
        self.sidecar = sidecar
        self.token_file = directory / "token"
        self.seed = seed
        self.stop = threading.Event()
        self.closing = threading.Event()
        self.problems = []
        self.acknowledged = [0] * 8
        self.pulled = 0
        self.seen = threading.Event()
        """Somebody pulled a snapshot, or found something wrong: until then there is nothing to judge."""
        jobs = [(self.produce_grpc, n) for n in range(5)] + [(self.produce_http, n) for n in range(5, 8)]
        jobs += [(self.scrape, n) for n in range(3)] + [(self.pull, n) for n in range(3)] + [(self.reload, 0)]
        self.threads = [threading.Thread(target=self._run, args=job, daemon=True) for job in jobs]

    def _run(self, job, number):
        try:
            while not self.stop.is_set():
                job(number)
        except _GONE as error:
            if not self.closing.is_set():
                self._tell_problem(job, error)
        except Exception as error:  # noqa: BLE001
            self._tell_problem(job, error)

    def _tell_problem(self, job, error):
        self.problems.append(f"{job.__name__}: {error!r}")
        self.seen.set()

    def _payload(self, number):
        first = 1 + self.acknowledged[number] * 10
        return make_export(2, steps_per_span=5, first_step=first, instance=f"engine-{number}").SerializeToString()

    def produce_grpc(self, number):
        with grpc.insecure_channel(f"127.0.0.1:{self.sidecar.grpc_port}") as channel:
            call = channel.unary_unary(METHOD)
            while not self.stop.is_set():
                try:
                    call(self._payload(number), timeout=20, metadata=(("authorization", f"Bearer {TOKEN}"),))
                except grpc.RpcError as error:
                    if self.closing.is_set() or error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        self.stop.wait(0.01)
                        continue
                    raise
                self.acknowledged[number] += 1

    def produce_http(self, number):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.sidecar.otlp_http_port}/v1/traces",
            data=self._payload(number),
            headers={"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {TOKEN}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=20):
                self.acknowledged[number] += 1
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != http.client.SERVICE_UNAVAILABLE:
                raise

    def _get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.sidecar.http_port}{path}", timeout=20) as answer:
            return answer.read(), answer.headers

    def scrape(self, number):
        path = ("/metrics", "/readyz", "/healthz")[number]
        body, _ = self._get(path)
        if path == "/metrics" and b"# TYPE tracefit_" not in body:
            raise AssertionError("half a page")

    def pull(self, _):
        newest = 0
        while not self.stop.is_set():
            try:
                body, headers = self._get("/snapshot")
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == http.client.SERVICE_UNAVAILABLE:
                    self.stop.wait(0.01)
                    continue  # nothing learned yet
                raise
            digest = hashlib.sha256(body).hexdigest()
            etag = headers["ETag"].strip('"')
            if not digest.startswith(etag):
                raise AssertionError(f"torn snapshot: {etag} is not {digest}")
            generation = json.loads(body)["generation"]
            if generation < newest:
                raise AssertionError(f"generation {generation} after {newest}")
            newest = generation
            self.pulled += 1
            self.seen.set()

    def reload(self, _):
        other = self.token_file.with_suffix(".new")
        other.write_text(TOKEN + "\n")
        other.replace(self.token_file)
        self.stop.wait(0.01)


def accounted(sidecar):
    """The bracket of each transport; spans accepted by all of them."""
    value = sidecar.metrics.value
    accepted = 0.0
    for transport in Transport:
        reasons = dict(REFUSED_SPANS.labels)["reason"]
        refused = sum(value(REFUSED_SPANS, transport, reason) for reason in reasons)
        failed, taken = value(FAILED_SPANS, transport), value(ACCEPTED_SPANS, transport)
        if value(RECEIVED_SPANS, transport) != taken + refused + failed or failed:
            raise AssertionError(f"{transport}: the bracket does not hold")
        accepted += taken
    return accepted


def run(directory, *, seconds, seed):
    """Stress; (acknowledged exports, snapshots pulled)."""
    faulthandler.dump_traceback_later(seconds + HANG_S, exit=True)
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        (directory / "token").write_text(TOKEN)
        config = make_config(
            directory / "s",
            DURABILITY="log",
            CHECKPOINT_INTERVAL_S="0.3",
            QUEUE_MIB="0.2",
            TOKEN_FILE=str(directory / "token"),
        )
        sidecar = Sidecar(config, SystemClock())
        sidecar.start()
        crowd = Crowd(sidecar, directory, seed)
        for thread in crowd.threads:
            thread.start()
        rng = random.Random(seed)
        threading.Event().wait(seconds * (0.9 + 0.2 * rng.random()))
        crowd.seen.wait(HANG_S / 2)  # a busy machine learns its first rows later
        crowd.closing.set()
        stopped = sidecar.stop()
        crowd.stop.set()
        for thread in crowd.threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), thread
        assert crowd.problems == [], crowd.problems
        assert stopped, "nothing acknowledged may be lost"
        accepted = accounted(sidecar)
        assert accepted >= 2 * sum(crowd.acknowledged)
        assert sidecar.metrics.value(DECODED_SPANS) == accepted
        assert crowd.pulled > 0
        return sum(crowd.acknowledged), crowd.pulled
    finally:
        sys.setswitchinterval(before_s)
        faulthandler.cancel_dump_traceback_later()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        acknowledged, pulled = run(Path(directory), seconds=args.seconds, seed=args.seed)
    sys.stdout.write(f"{acknowledged} exports acknowledged, {pulled} snapshots pulled, none torn, no deadlock\n")


if __name__ == "__main__":
    main()
