"""A recording sent again: every stamp moved by one constant per clock, durations untouched, only the sending faster.

Wall clock and monotonic clock move by a constant each, such that the end of the recording reads as the end of the
demo. The learner sees exactly the intervals that were measured.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from collector.receive.otlp import METHOD
from collector.recordings import Recording
from collector.runtime import Clock, StartError, Task

MONOTONIC_NS_KEYS = frozenset(
    {"step.ts_start_ns", "step.ts_end_ns", "step.ts_output_ns", "step.ts_done_ns", "ts.monotonic_ns"}
)
MONOTONIC_S_KEYS = frozenset({"ts.monotonic", "event.ts.monotonic"})
"""Attributes that carry a monotonic stamp: integer nanoseconds, double seconds."""

MONOTONIC_FLOOR_NS = 3_600_000_000_000
"""A machine that booted just now has a monotonic clock near 0; the recording must not begin before its boot."""

SEND_TIMEOUT_S = 30.0
RETRY_S = 1.0
_RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Received(msgspec.Struct):
    """When an export of the recording arrived."""

    recv_unix_ns: int
    recv_mono_ns: int


class Shift(NamedTuple):
    """What to add to the stamps of either clock."""

    unix_ns: int
    mono_ns: int


class Sending(NamedTuple):
    """One export, and when to send it, counted from the start."""

    after_s: float
    recorded_s: float
    payload: bytes


def find_recording(given: Path | None) -> Path:
    """The recording that was asked for, or the one that comes along: in a checkout, or in an installed package.

    Raises:
        StartError: there is none.
    """
    here = Path(__file__).resolve()
    bundled = [here.parents[2] / "tests" / "data" / "c10_long", here.parent / "demo_recording"]
    places = [given] if given is not None else [directory / "otlp.pb.gz" for directory in bundled]
    for path in places:
        if path.is_file():
            return path
    raise StartError(f"there is no recording {places[-1]}")


def read_index(recording: Path) -> list[Received]:
    """The receive times beside a recording."""
    path = recording.with_name(recording.name.replace(".pb.gz", ".idx.jsonl.gz"))
    try:
        with gzip.open(path) as lines:
            index = [msgspec.json.decode(line, type=Received) for line in lines]
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise StartError(f"cannot read the receive times in {path}: {error}") from None
    if not index:
        raise StartError(f"{path} is empty")
    return index


def schedule(recording: Path, speed: float, clock: Clock, note: Callable[[str], None]) -> Iterator[Sending]:
    """The exports of a recording as they should be sent from now on."""
    index = read_index(recording)
    first, last = index[0], index[-1]
    lasts_ns = int((last.recv_unix_ns - first.recv_unix_ns) / speed)
    shift = Shift(
        unix_ns=clock.unix_nano() + lasts_ns - last.recv_unix_ns,
        mono_ns=max(
            clock.monotonic_ns() + lasts_ns - last.recv_mono_ns,
            MONOTONIC_FLOOR_NS - first.recv_mono_ns,
        ),
    )
    for received, timed in zip(index, Recording(recording, note).exports(), strict=False):
        recorded_s = (received.recv_unix_ns - first.recv_unix_ns) / 1e9
        yield Sending(recorded_s / speed, recorded_s, shifted(timed.export.payload, shift))


def shifted(payload: bytes, shift: Shift) -> bytes:
    """The same export with all its stamps moved."""
    request = ExportTraceServiceRequest.FromString(payload)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                span.start_time_unix_nano += shift.unix_ns
                span.end_time_unix_nano += shift.unix_ns
                for attribute in span.attributes:
                    _shift_attribute(attribute, shift)
                for event in span.events:
                    event.time_unix_nano += shift.unix_ns
                    for attribute in event.attributes:
                        _shift_attribute(attribute, shift)
    return request.SerializeToString()


def _shift_attribute(attribute: KeyValue, shift: Shift) -> None:
    if attribute.key in MONOTONIC_NS_KEYS:
        attribute.value.int_value += shift.mono_ns
    elif attribute.key in MONOTONIC_S_KEYS:
        attribute.value.double_value += shift.mono_ns / 1e9


class Feeder:
    """Sends a schedule through a real channel; an acknowledged export is counted."""

    def __init__(self, target: str, sendings: Iterator[Sending], clock: Clock) -> None:
        self.recorded_s = 0.0
        self.exports = 0
        self.problem = ""
        self._sendings = sendings
        self._clock = clock
        self._start_ns = 0
        self._next: Sending | None = None
        self._channel = grpc.insecure_channel(target)
        self._export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(METHOD)
        self._task = Task("feeder", self._send_next)

    def start(self) -> None:
        """Begin to send in a thread of its own."""
        self._start_ns = self._clock.monotonic_ns()
        self._next = next(self._sendings, None)
        self._task.start()

    def stop(self) -> None:
        """No further export; the one under way ends."""
        self._task.stop(SEND_TIMEOUT_S)
        self._channel.close()

    @property
    def running(self) -> bool:
        """There is more to send."""
        return self._task.running

    def _send_next(self) -> float | None:
        """Send what is due; the seconds until the next export is, None after the last."""
        sending = self._next
        if sending is None:
            return None
        early_s = sending.after_s - (self._clock.monotonic_ns() - self._start_ns) / 1e9
        if early_s > 0:
            return early_s
        try:
            self._export(sending.payload, timeout=SEND_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() in _RETRYABLE:
                return RETRY_S
            self.problem = f"the sidecar refused an export: {error.code().name}"
            return None
        self.exports += 1
        self.recorded_s = sending.recorded_s
        self._next = next(self._sendings, None)
        return 0.0
