"""A day of traffic in minutes: the real sidecar behind its real port, and what a day brings.

    python -m tests.torture.soak [--hours 24] [--steps 10200000] [--seed 1]

Per simulated hour: a load (busy days, idle nights, bursts), vLLM restarts, drifts of the speed, another model under the
same instance, repeated exports and broken ones. Event time is the day's; wall time is what it takes.

What must hold: RSS at the end <= RSS after hour 4 + 3 MB, file descriptors and threads flat, the accounting exact, no
stall, and the median relative error of the published step time within ``ERROR_MAX`` after every hour.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from collector.app import Sidecar
from collector.receive.otlp.otlp_grpc import METHOD
from collector.runtime.clock import SystemClock
from collector.runtime.memory import resident_bytes
from tests.support import otlp_bytes as otlp
from tests.support.clocks import eventually
from tests.support.sidecars import get, make_config, metric

HOUR_NS = 3_600_000_000_000
NIGHT = frozenset({12, 13, 14, 15, 16, 17})
"""The day begins in the morning, so that hour 4 is a busy one."""
ERROR_MAX = 0.10
RSS_GROWTH_BYTES = 3 * 2**20
SPAN_STEPS = 100
SPANS = 10
STEPS = SPAN_STEPS * SPANS
POOL = 24
FIRST_STEP = 1 << 21
"""Step ids of four bytes and times of seven, as long as the day lasts: only digits change between exports."""
FIRST_MONO_NS = 5 * 10**12
_KEYS = tuple(
    key for key in otlp.PLUGIN_KEYS if key not in ("step.ts_output_ns", "step.ts_done_ns", "batch.attn_pairs")
)
_POOL_NAME = "grpc"
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_MARKS = {"step.id": 0x0FEDCBA, "step.ts_start_ns": 0x1FEDCBA987654, "step.ts_end_ns": 0x1EDCBA9876543}


class Mould:
    """One export of a thousand steps: its bytes, and where the digits are that make it another one."""

    def __init__(self, rng) -> None:
        self.base_us = np.empty(STEPS)
        spans, contents = [], []
        for index in range(SPANS):
            events = [self._event(rng, index * SPAN_STEPS + number) for number in range(SPAN_STEPS)]
            contents += events
            spans.append(otlp.step_span(events, span_id=b"SPAN%04d" % index))
        names = {"service.instance.id": "engine-0", "vllm.model": "model-a"}
        resource = otlp.field(1, b"".join(otlp.attribute(k, v, number=1) for k, v in names.items()))
        scope = otlp.field(1, otlp.field(1, b"vllm.scheduler.step"))
        whole = otlp.field(1, resource + otlp.field(2, scope + b"".join(otlp.field(2, span) for span in spans)))
        self.bytes = np.frombuffer(bytearray(whole), np.uint8)
        at = 0
        self.at = {name: np.empty(STEPS, np.int64) for name in (*_MARKS, "unix")}
        for number, content in enumerate(contents):
            at = whole.index(content, at)
            for name, mark in _MARKS.items():
                self.at[name][number] = at + content.index(otlp.varint(mark))
            self.at["unix"][number] = at + 1
        self.spans_at = np.array([whole.index(b"SPAN%04d" % index) for index in range(SPANS)])
        self.ends_at = np.array([whole.index(b"\x41", at + 8 + 19) + 1 for at in self.spans_at])
        self.model_at = whole.index(b"model-a") + 6

    def _event(self, rng, number):
        requests, prefill = rng.randrange(2, 64), rng.randrange(1, 600) if rng.random() < 0.2 else 0
        context = requests * rng.randrange(50, 2000)
        self.base_us[number] = 4000 + 30 * requests + 6 * prefill + 0.02 * context
        decoding = requests - (prefill > 0)
        values = otlp.step_values(1, prefill, decoding) | dict(_MARKS)
        values |= {"batch.context_tokens": context, "batch.context_tokens_single": context}
        values |= {"batch.num_finished": 0}
        return otlp.event([otlp.attribute(key, values[key]) for key in _KEYS])

    def cast(self, first_step, starts_ns, offset_ns, serial, model):
        """The export with these steps."""
        out = self.bytes.copy()
        _put_varint(out, self.at["step.id"], np.arange(first_step, first_step + STEPS), 4)
        _put_varint(out, self.at["step.ts_start_ns"], starts_ns, 7)
        _put_varint(out, self.at["step.ts_end_ns"], starts_ns + 90_000, 7)
        _put_fixed(out, self.at["unix"], starts_ns + 90_000 + offset_ns)
        _put_fixed(out, self.spans_at, np.arange(serial, serial + SPANS))
        _put_fixed(out, self.ends_at, starts_ns[SPAN_STEPS - 1 :: SPAN_STEPS] + offset_ns + 10**6)
        out[self.model_at] = ord(model)
        return out.tobytes()


def _put_varint(out, at, values, size):
    for digit in range(size):
        more = 0x80 if digit < size - 1 else 0
        out[at + digit] = (values >> (7 * digit) & 0x7F | more).astype(np.uint8)


def _put_fixed(out, at, values):
    raw = values.astype("<i8").view(np.uint8).reshape(len(values), 8)
    for byte in range(8):
        out[at + byte] = raw[:, byte]


class Server:
    """A simulated vLLM whose step time is linear in its work, at a speed that drifts."""

    def __init__(self, seed) -> None:
        self._rng = np.random.default_rng(seed)
        self._moulds = [Mould(random.Random(seed + number)) for number in range(POOL)]
        self._serial = 1
        self.unix_ns = 1_795_000_000_000_000_000
        self.speed = 1.0
        self.model = "a"
        self.restart()

    def restart(self):
        """Step ids and the monotonic clock begin again."""
        self.unix_ns += 60 * 10**9
        self.step, self.mono_ns = FIRST_STEP, FIRST_MONO_NS
        self.offset_ns = self.unix_ns - self.mono_ns

    def idle(self, ns):
        """Nothing to do for a while."""
        self.mono_ns += ns
        self.unix_ns += ns

    def export(self):
        """The next thousand steps."""
        mould = self._moulds[self._rng.integers(POOL)]
        elapsed_ns = (mould.base_us * self.speed * self._rng.normal(1, 0.03, STEPS) * 1e3).astype(np.int64)
        starts_ns = self.mono_ns + np.concatenate(([0], np.cumsum(elapsed_ns)))
        payload = mould.cast(self.step, starts_ns[:-1], self.offset_ns, self._serial, self.model)
        self.unix_ns += int(starts_ns[-1]) - self.mono_ns
        self.mono_ns = int(starts_ns[-1])
        self.step += STEPS
        self._serial += SPANS
        return payload


class Hour(NamedTuple):
    """How things stood at the end of an hour."""

    hour: int
    steps: int
    rss_bytes: int
    files: int
    threads: int
    median_error: float


def settled(samples=10):
    """Least RSS, files and threads of a second or so: snapshots, state saves and scrapes under way are no growth.

    The gRPC receiver's pool is not counted: it makes its threads when it first needs them, up to its bound.
    """
    seen = []
    for _ in range(samples):
        gc.collect()
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith(_POOL_NAME)]
        seen.append((resident_bytes(), len(list(Path("/proc/self/fd").iterdir())), len(threads)))
        time.sleep(0.1)
    return tuple(min(column) for column in zip(*seen, strict=True))


class Day:
    """The sidecar, the server, and what was sent."""

    def __init__(self, directory, seed, learners) -> None:
        self.sidecar = Sidecar(
            make_config(directory, LEARNERS=learners, STATE__INTERVAL_S="2", SNAPSHOT__PUBLISH_INTERVAL_S="1"),
            SystemClock(),
        )
        self.sidecar.start()
        self.server = Server(seed)
        self.rng = random.Random(seed)
        self.sent = self.repeated = self.broken = 0
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.sidecar.grpc_port}")
        self._call = self._channel.unary_unary(METHOD)

    def hour(self, number, exports):
        """One hour; what it left."""
        night = number % 24 in NIGHT
        count = max(2, exports // 8 if night else exports)
        if number and number % 5 == 0:
            self.server.restart()
        if number and number % 6 == 3:
            self.server.speed *= self.rng.choice((0.8, 1.25))
        if number % 8 == 3:  # from hour 4 on nothing is new, so that nothing has to grow
            self.server.model = "b" if self.server.model == "a" else "a"
            self.server.restart()
        busy_ns = 0
        for _ in range(count):
            before_ns = self.server.unix_ns
            payload = self.server.export()
            busy_ns += self.server.unix_ns - before_ns
            self._send(payload)
            self.sent += 1
            if self.rng.random() < 0.01:
                self._send(payload)
                self.repeated += 1
            if self.rng.random() < 0.01:
                self._send_broken(payload)
        self.server.idle(max(0, HOUR_NS - busy_ns))
        return self._look(number, count)

    def _send(self, payload):
        while True:
            try:
                self._call(payload, timeout=30)
            except grpc.RpcError as error:
                assert error.code() in _RETRIED, error  # noqa: PT017
                time.sleep(0.05)
            else:
                return

    def _send_broken(self, payload):
        try:
            self._call(payload[: self.rng.randrange(1, len(payload))], timeout=30)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error  # noqa: PT017
            self.broken += 1
        else:
            raise AssertionError("a cut export is no export")

    def _look(self, number, count):
        eventually(lambda: not self.sidecar.queue.in_flight_bytes, 60)
        keep = self.sidecar._keeper
        eventually(lambda: not (keep._dirty or keep._pending or keep._writing), 60)  # its end gives pages back
        snapshot = self.sidecar.snapshot()
        assert snapshot is not None
        errors = [
            model.error.median_ape
            for config in snapshot.configs
            for model in [config.targets["step_time"].models["portable"]]
            if model.error is not None and config.config["model"] == f"model-{self.server.model}"
        ]
        stalled = [
            r for r in ("worker", "decode", "join", "learner") if self.value(f'learning_stalled{{reason="{r}"}}')
        ]
        assert not stalled, stalled
        return Hour(number, count * STEPS, *settled(), max(errors, default=1.0))

    def value(self, series):
        return metric(self.sidecar.http_port, f"tracefit_{series}")

    def account(self):
        """Every span and event of the day is where it should be."""
        get(self.sidecar.http_port, "/snapshot")
        spans = (self.sent + self.repeated) * SPANS
        assert self.value('receiver_accepted_spans_total{transport="grpc"}') == spans
        received = self.value('receiver_received_spans_total{transport="grpc"}')
        refused = received - spans
        assert refused >= 0
        assert self.value('receiver_requests_total{outcome="undecodable",transport="grpc"}') == self.broken
        assert self.value("decode_received_spans_total") == spans
        assert self.value("decode_accepted_spans_total") == self.sent * SPANS
        assert self.value('decode_skipped_spans_total{reason="duplicate"}') == self.repeated * SPANS
        assert self.value("decode_accepted_events_total") == self.sent * STEPS
        assert self.value("worker_failed_spans_total") == 0
        return {"spans": spans, "steps": self.sent * STEPS, "repeated": self.repeated, "broken": self.broken}

    def close(self):
        self._channel.close()
        assert self.sidecar.stop()


def run(directory, *, hours, steps, seed, learners="[rls, river:residual]", say=lambda _: None):
    """The day; hours and the account, after every assertion held."""
    day = Day(directory, seed, learners)
    try:
        weight = sum(1 / 8 if hour % 24 in NIGHT else 1 for hour in range(hours))
        exports = max(2, round(steps / STEPS / weight))
        found = []
        for number in range(hours):
            found.append(day.hour(number, exports))
            say(
                f"hour {number:2}  {found[-1].steps:8} steps  RSS {found[-1].rss_bytes / 2**20:6.1f} MiB  "
                f"{found[-1].files} files  {found[-1].threads} threads  error {found[-1].median_error:.3f}"
            )
        account = day.account()
    finally:
        day.close()
    assert max(hour.median_error for hour in found[1:]) <= ERROR_MAX
    base = found[min(4, len(found) // 2)]
    assert found[-1].files <= base.files + 1
    assert found[-1].threads <= base.threads + 1
    return found, account


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10_200_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    start_s, cpu_s = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        found, account = run(
            Path(directory),
            hours=args.hours,
            steps=args.steps,
            seed=args.seed,
            say=lambda text: sys.stdout.write(text + "\n") and sys.stdout.flush(),
        )
    growth = found[-1].rss_bytes - found[min(4, len(found) // 2)].rss_bytes
    sys.stdout.write(f"{account}\nRSS growth after hour 4: {growth / 2**20:.2f} MiB, ")
    sys.stdout.write(f"{time.monotonic() - start_s:.0f} s, {time.process_time() - cpu_s:.0f} s CPU\n")
    if growth > RSS_GROWTH_BYTES:
        sys.exit("memory grew")


if __name__ == "__main__":
    main()
