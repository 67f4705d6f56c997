"""``tracefit demo``: a real sidecar in its own process on real ports, fed with a recording of a real server.

The wall clock and the monotonic clock of the recording move by a constant each, so that what was measured between two
stamps stays one interval, and the end of the recording reads as the end of the demo. Throttled, intervals are longer
from the middle on. A recording that is sent again has other ids: a request is known by its id for longer than a round.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.config import ENV_PREFIX
from collector.ingest.otlp_grpc import METHOD
from collector.recordings import Recording
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, PrintLine, StartError, Stop, SystemClock, Task
from collector.service import STATE_FILES
from exporters.charts import Z_95
from exporters.snapshot_file import SNAPSHOT_NAME
from exporters.wording import unit_text
from online import FeatureSnapshot, ModelSnapshot, Snapshot

from .report import lines

MONOTONIC_NS_KEYS = frozenset(
    {"step.ts_start_ns", "step.ts_end_ns", "step.ts_output_ns", "step.ts_done_ns", "ts.monotonic_ns"}
)
MONOTONIC_S_KEYS = frozenset({"ts.monotonic", "event.ts.monotonic"})
"""Attributes that carry a monotonic stamp: integer nanoseconds, double seconds."""

REQUEST_ID_KEYS = frozenset({"gen_ai.request.id", "request.id"})
_REQUEST_DIGITS = re.compile(r"(?<=-)[0-9a-f]{4}(?=[0-9a-f]{12})")


class Stamps(Protocol):
    """What becomes of a stamp of either clock."""

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""


class Shift(NamedTuple):
    """All stamps of a clock moved by one constant: every interval is what was measured."""

    unix_ns: int
    mono_ns: int

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""
        return unix_ns + self.unix_ns

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""
        return mono_ns + self.mono_ns

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""
        return mono_s + self.mono_ns / 1e9


class Slowdown(NamedTuple):
    """From one moment on, given by either clock, everything takes ``factor`` times as long."""

    unix_ns: int
    mono_ns: int
    factor: float

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""
        return unix_ns + self._later_by(unix_ns - self.unix_ns)

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""
        return mono_ns + self._later_by(mono_ns - self.mono_ns)

    def mono_s_of(self, mono_s: float) -> float:
        """The same in seconds."""
        return mono_s + max(mono_s - self.mono_ns / 1e9, 0.0) * (self.factor - 1.0)

    def _later_by(self, since_ns: int) -> int:
        return round(max(since_ns, 0) * (self.factor - 1.0))


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    """Every span of an export."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            yield from scope.spans


def restamp(request: ExportTraceServiceRequest, stamps: Stamps) -> None:
    """Change every stamp of an export in place."""
    for span in spans_of(request):
        span.start_time_unix_nano = stamps.unix_of(span.start_time_unix_nano)
        span.end_time_unix_nano = stamps.unix_of(span.end_time_unix_nano)
        for attribute in span.attributes:
            _restamp_attribute(attribute, stamps)
        for event in span.events:
            event.time_unix_nano = stamps.unix_of(event.time_unix_nano)
            for attribute in event.attributes:
                _restamp_attribute(attribute, stamps)


def restamped(payload: bytes, *each: Stamps) -> bytes:
    """An export with its stamps changed by each in turn."""
    request = ExportTraceServiceRequest.FromString(payload)
    for stamps in each:
        restamp(request, stamps)
    return request.SerializeToString()


def renamed(payload: bytes, salt: int) -> bytes:
    """An export whose requests, traces and spans have other ids, the same ones wherever they are named."""
    request = ExportTraceServiceRequest.FromString(payload)
    for span in spans_of(request):
        span.trace_id = _salted(span.trace_id, salt)
        span.span_id = _salted(span.span_id, salt)
        span.parent_span_id = _salted(span.parent_span_id, salt)
        for attributes in (span.attributes, *(event.attributes for event in span.events)):
            for attribute in attributes:
                if attribute.key in REQUEST_ID_KEYS:
                    attribute.value.string_value = _salted_request(attribute.value.string_value, salt)
    return request.SerializeToString()


def _salted(known: bytes, salt: int) -> bytes:
    return (int.from_bytes(known[:2], "big") ^ salt).to_bytes(2, "big") + known[2:] if known else known


def _salted_request(known: str, salt: int) -> str:
    """The digits after ``cmpl-``, which what a server appends leaves as they are."""
    return _REQUEST_DIGITS.sub(lambda digits: f"{int(digits[0], 16) ^ salt:04x}", known, count=1)


def _restamp_attribute(attribute: KeyValue, stamps: Stamps) -> None:
    if attribute.key in MONOTONIC_NS_KEYS:
        attribute.value.int_value = stamps.mono_of(attribute.value.int_value)
    elif attribute.key in MONOTONIC_S_KEYS:
        attribute.value.double_value = stamps.mono_s_of(attribute.value.double_value)


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


HOME = Path(__file__).resolve().parents[2]
PORT_GRPC, PORT_PAGES = 4317, 9464
POLL_S = 1.5
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
_CELL = 21


class Ports(NamedTuple):
    """Where the demo's sidecar listens, on loopback."""

    grpc: int
    pages: int


def demo(
    recording: Path | None, speed: float, say: PrintLine, directory: Path | None = None, throttle: float = 1.0
) -> int:
    """Run the demo to its end or to Ctrl-C; the exit code says whether anything was learned."""
    source = find_recording(recording)
    directory = (directory or Path("snapshots", "demo")).absolute()
    forget_last_run(directory)
    interrupted = False
    with _claimed_ports() as ports, sidecar_process(ports, directory) as process:
        try:
            await_ready(process, ports.pages, directory)
            _announce(speed, throttle, ports, say)
            _feed(source, speed, throttle, ports, say)
        except KeyboardInterrupt:
            interrupted = True
            say("stopping")
    learned = _conclude(directory / SNAPSHOT_NAME, say)
    return EXIT_OK if learned or interrupted else EXIT_FAILED


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end a demo as Ctrl-C does, so that its sidecars, in their sessions, end with it."""
    taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send_forever(
    recording: Path | None, target: str, clock: Clock, stop: Stop, say: PrintLine, throttle: float = 1.0
) -> int:
    """Send the recording to a sidecar at the pace it was recorded, again and again, until a stop is asked for.

    Faster would overlap with the round before: event time has to go on with the clock.
    """
    source, pause = find_recording(recording), threading.Event()
    number = 0
    while not stop.asked:
        number += 1
        say(f"Sending the recording to {target}, round {number}; Ctrl-C ends it.")
        salt = clock.unix_nano() // 1_000_000_000 % 0xFFFF + 1  # rounds are minutes apart, also those of a run before
        feeder = Feeder(target, schedule(source, 1.0, clock, say, throttle, salt), clock)
        feeder.start()
        while feeder.running and not stop.asked:
            pause.wait(POLL_S)
        feeder.stop()
        if feeder.problem:
            raise StartError(feeder.problem)
    return EXIT_OK


def forget_last_run(directory: Path) -> None:
    """The recording is sent with the same span ids again: who remembers them learns nothing."""
    make_empty(directory, *(directory / name for name in (SNAPSHOT_NAME, *STATE_FILES)))


def make_empty(directory: Path, *old_files: Path) -> None:
    """A directory without what the last demo left in it.

    Raises:
        StartError: it cannot be written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in old_files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise StartError(f"cannot write to {directory}: {error.strerror}") from None


def _feed(source: Path, speed: float, throttle: float, ports: Ports, say: PrintLine) -> None:
    clock = SystemClock()
    feeder = Feeder(f"127.0.0.1:{ports.grpc}", schedule(source, speed, clock, say, throttle), clock)
    try:
        feeder.start()
        _watch(feeder, ports.pages, say)
    finally:
        feeder.stop()
    if feeder.problem:
        say(feeder.problem)


@contextlib.contextmanager
def _claimed_ports() -> Iterator[Ports]:
    """The well-known ports; others for a second demo, which would find them free until the first one's sidecar is up.

    The claim is a name in the abstract namespace: it is as local to a network namespace as the ports, and goes with us.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind("\0tracefit-demo")
            wanted = Ports(PORT_GRPC, PORT_PAGES)
        except OSError:
            wanted = Ports(0, 0)
        yield Ports(free_port(wanted.grpc), free_port(wanted.pages))


def free_port(wanted: int = 0) -> int:
    """The well-known port, or another one if somebody has it."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            taken: int = probe.getsockname()[1]
            return taken
    raise StartError("no free port on 127.0.0.1")


@contextlib.contextmanager
def sidecar_process(ports: Ports, directory: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """``tracefit run`` in a session of its own, so that Ctrl-C reaches us only and the sidecar can drain."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environment |= {
        "TRACEFIT_LISTEN": f"127.0.0.1:{ports.grpc}",
        "TRACEFIT_LISTEN_HTTP": "",
        "TRACEFIT_PAGES": f"127.0.0.1:{ports.pages}",
        "TRACEFIT_DIRECTORY": str(directory),
        "TRACEFIT_PUBLISH_INTERVAL_S": "0.5",
    } | {f"{ENV_PREFIX}{name}": value for name, value in settings.items()}
    with (directory / "sidecar.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "collector", "run"], cwd=HOME, env=environment, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def await_ready(process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    """Wait until it takes telemetry; StartError with its last word if it does not."""
    pause = threading.Event()
    for _ in range(int(START_TIMEOUT_S / 0.1)):
        if process.poll() is not None:
            break
        if _get(port, "/readyz") is not None:
            return
        pause.wait(0.1)
    tail = (directory / "sidecar.log").read_text(errors="replace").strip().splitlines()[-1:]
    raise StartError(f"the sidecar did not start: {''.join(tail) or 'no word from it'}")


def _announce(speed: float, throttle: float, ports: Ports, say: PrintLine) -> None:
    say(f"A real sidecar is running; it is sent what a real vLLM once sent, {speed:g}x faster.")
    if throttle != 1.0:
        say(f"From the middle of the recording on every time in it is {throttle:g} times as long.")
    say(f"  OTLP/gRPC  127.0.0.1:{ports.grpc}")
    for page in ("", "metrics", "snapshot", "healthz"):
        say(f"  http://127.0.0.1:{ports.pages}/{page}")
    say("What one scheduler step costs, in µs (± 95 %), as the evidence comes in; Ctrl-C ends it.")


def _watch(feeder: Feeder, port: int, say: PrintLine) -> None:
    pause = threading.Event()
    header: tuple[str, ...] = ()
    shown = -1
    while feeder.running:
        pause.wait(POLL_S)
        body = _get(port, "/snapshot")
        snapshot = Snapshot.from_json(body) if body else None
        model = _step_model(snapshot)
        if snapshot is None or model is None or snapshot.generation == shown:
            continue
        shown = snapshot.generation
        names = tuple(f"{feature.name} [{unit_text(feature.unit)}]" for feature in model.features)
        if names != header:
            header = names
            say(f"{'recorded':>9} {'rows':>6} " + " ".join(f"{_short(name):>{_CELL}}" for name in names) + "  error")
        cells = " ".join(f"{_cell(feature):>{_CELL}}" for feature in model.features)
        error = "" if model.prediction_error is None else f"{model.prediction_error.median_ape:6.1%}"
        say(f"{feeder.recorded_s:>7.0f} s {model.rows:>6} {cells} {error}")


def _short(name: str) -> str:
    return name.replace("decode_context_tokens", "context").replace("_tokens", "")


def _cell(feature: FeatureSnapshot) -> str:
    bar = f" ± {Z_95 * feature.stderr:.2g}" if feature.stderr is not None else ""
    return f"{feature.coefficient:.5g}{bar}"


def _step_model(snapshot: Snapshot | None) -> ModelSnapshot | None:
    for config in snapshot.configs if snapshot else ():
        target = config.targets.get("step_time")
        if target and "portable" in target.models and target.models["portable"].features:
            return target.models["portable"]
    return None


def _get(port: int, path: str) -> bytes | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            body: bytes = response.read()
            return body
    except (urllib.error.URLError, OSError):
        return None


def _conclude(path: Path, say: PrintLine) -> bool:
    if not path.is_file():
        say("nothing was learned")
        return False
    say("")
    for line in lines(Snapshot.from_json(path.read_bytes())):
        say(line)
    say(f"snapshot: {path}")
    return True
