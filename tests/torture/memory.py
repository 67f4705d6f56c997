"""More than it can hold, at a limit of 100 MiB: nothing acknowledged is lost, and it accepts again by itself.

    python -m tests.torture.memory [--limit-mib 100] [--seconds 15] [--producers 2]

Producers send as fast as they can for a while; then one asks every quarter of a second whether it accepts again. In
the end it is stopped, and every acknowledged step must be learned from, or counted as given up.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from collector.receive.otlp.otlp_grpc import METHOD
from tests.support.otlp_load import Stream
from tests.torture.harness import Victim, said

RECOVERY_S = 10.0


class Report(NamedTuple):
    """What a run showed."""

    acknowledged_steps: int
    idle_steps: int
    refused: int
    given_up: int
    rows: int
    recovery_s: float
    short_seen: bool


class Producer(threading.Thread):
    """Sends the exports of one engine as fast as it can, each until it is acknowledged or time is up."""

    def __init__(self, port, number, until_s):
        super().__init__()
        self.port, self.until_s = port, until_s
        self.stream = Stream(1 + number, instance=f"engine-{number}", requests=True)
        self.exports, self.steps, self.refused = 0, 0, 0

    @property
    def idle_steps(self):
        """Steps without a request: they give no row."""
        columns = self.stream.lap.columns
        return int(np.mean(columns["decodes"] + columns["prefill_requests"] == 0) * self.steps)

    def run(self):
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            call = channel.unary_unary(METHOD)
            while time.monotonic() < self.until_s:
                export = self.stream.export(self.exports)
                while not self.sent(call, export) and time.monotonic() < self.until_s:
                    time.sleep(0.05)

    def sent(self, call, export):
        try:
            call(export.payload, timeout=20)
        except grpc.RpcError:
            self.refused += 1
            return False
        self.exports += 1
        self.steps += export.steps
        return True


def run(directory: Path, *, limit_mib=100, seconds=15.0, producers=2) -> Report:
    victim = Victim(directory, DURABILITY="memory", MEMORY__LIMIT_MIB=str(limit_mib))
    threads = [Producer(victim.grpc_port, number, time.monotonic() + seconds) for number in range(producers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stopped_s = time.monotonic()
    first = threads[0]
    with grpc.insecure_channel(f"127.0.0.1:{victim.grpc_port}") as channel:
        call = channel.unary_unary(METHOD)
        while not first.sent(call, first.stream.export(first.exports)) and time.monotonic() < stopped_s + 30:
            time.sleep(0.25)
    recovery_s = time.monotonic() - stopped_s
    given_up = int(victim.metric('tracefit_join_events_total{event="step_given_up"}'))
    if victim.end(signal.SIGTERM) != 0:
        raise AssertionError(said(directory)[-3000:])
    snapshot = json.loads((directory / "snapshot.json").read_bytes())
    busy = sum(config["targets"]["schedule_time"]["models"]["portable"]["rows"] for config in snapshot["configs"])
    steps, idle, refused = (sum(getattr(t, what) for t in threads) for what in ("steps", "idle_steps", "refused"))
    return Report(steps, idle, refused, given_up, busy, recovery_s, "memory is short" in said(directory))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--producers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(
            Path(directory) / "life", limit_mib=given.limit_mib, seconds=given.seconds, producers=given.producers
        )
    lost = report.acknowledged_steps - report.idle_steps - report.rows - report.given_up - 2 * given.producers
    sys.stdout.write(f"{report}\n")
    if lost > 0 or report.recovery_s > RECOVERY_S:
        sys.stdout.write(f"MISS: {max(0, lost)} acknowledged steps lost, accepting after {report.recovery_s:.1f} s\n")
        return 1
    sys.stdout.write(f"nothing acknowledged was lost; accepting again after {report.recovery_s:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
