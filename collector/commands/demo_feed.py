"""A recording sent again: every stamp moved by one constant per clock, durations untouched, only the sending faster.

Wall clock and monotonic clock move by a constant each, such that the end of the recording reads as the end of the
demo. The learner sees exactly the intervals that were measured, or, throttled, the same from the middle on but longer.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec

from collector.receive.otlp import METHOD
from collector.recordings import Recording
from collector.runtime import Clock, PrintLine, StartError, Task

from .demo_stamps import Shift, Slowdown, renamed, restamped

MONOTONIC_FLOOR_NS = 3_600_000_000_000
"""A machine that booted just now has a monotonic clock near 0; the recording must not begin before its boot."""

SEND_TIMEOUT_S = 30.0
RETRY_S = 1.0
_RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Received(msgspec.Struct):
    """When an export of the recording arrived."""

    recv_unix_ns: int
    recv_mono_ns: int


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


def schedule(
    recording: Path, speed: float, clock: Clock, note: PrintLine, throttle: float = 1.0, salt: int = 0
) -> Iterator[Sending]:
    """The exports of a recording as they should be sent from now on.

    Args:
        recording: with its receive times beside it.
        speed: how much faster than recorded.
        clock: whose stamps they get.
        note: receives what is wrong with the recording.
        throttle: see ``throttling``.
        salt: other ids for every other number; 0 leaves them as they are.
    """
    index = read_index(recording)
    slow = throttling(index, throttle)
    index = [Received(slow.unix_of(each.recv_unix_ns), slow.mono_of(each.recv_mono_ns)) for each in index]
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
        payload = restamped(timed.export.payload, slow, shift)
        yield Sending(recorded_s / speed, recorded_s, renamed(payload, salt) if salt else payload)


def throttling(index: Sequence[Received], factor: float) -> Slowdown:
    """From the middle of a recording on its machine takes ``factor`` times as long, as when its power is capped."""
    middle_unix_ns = (index[0].recv_unix_ns + index[-1].recv_unix_ns) // 2
    begins = next(received for received in index if received.recv_unix_ns >= middle_unix_ns)
    return Slowdown(begins.recv_unix_ns, begins.recv_mono_ns, factor)


def save_recording(source: Path, out: Path, throttle: float, say: PrintLine) -> None:
    """Write what would be sent as a file, framed as the OpenTelemetry Collector frames protobuf, with gzip.

    Raises:
        StartError: it cannot be written.
    """
    slow, number = throttling(read_index(source), throttle), 0
    try:
        with gzip.open(out, "wb") as file:
            for timed in Recording(source, say).exports():
                payload = restamped(timed.export.payload, slow)
                file.write(len(payload).to_bytes(4, "big") + payload)
                number += 1
    except OSError as error:
        raise StartError(f"cannot write {out}: {error.strerror}") from None
    say(f"{number} exports of {source.parent.name}: {out}")


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
        self._target = target
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
            silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self.problem = (
                f"nothing answers at {self._target}"
                if silent
                else f"the sidecar refused an export: {error.code().name}"
            )
            return None
        self.exports += 1
        self.recorded_s = sending.recorded_s
        self._next = next(self._sendings, None)
        return 0.0
