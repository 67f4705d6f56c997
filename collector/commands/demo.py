"""``tracefit demo``: a real sidecar on real ports, fed over gRPC with a recording of a real server.

With ``--gpu`` it is the recording of a simulated server (tests/support/gpu_demo.py), whose steps take as long as those
of Llama 3.1 8B on an H100. Their times are composed of the kernel times that NVIDIA measured and ships in
aiconfigurator-core 0.12.0 (Apache-2.0); those of the host are assumed.

Both clocks of the recording move by one constant, so that what was measured between two stamps stays one interval, and
the end of the recording reads as the end of the demo. Slowed down, intervals are longer from the middle on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import tracefit
from collector.app import Sidecar
from collector.config import Config
from collector.decode import Export
from collector.ingest.otlp_grpc import METHOD
from collector.recordings import Recording
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, StartError, print_stderr, print_stdout, running
from collector.service import STATE_NAME
from exporters.questions import read_plan
from exporters.snapshot_file import SNAPSHOT_NAME
from exporters.wording import STEP_TIME, estimate, percent
from online import Floats

from .ask import ask, published, shown_lines

MONOTONIC_NS_KEYS = frozenset(
    {"step.ts_start_ns", "step.ts_end_ns", "step.ts_output_ns", "step.ts_done_ns", "ts.monotonic_ns"}
)
MONOTONIC_S_KEYS = frozenset({"ts.monotonic", "event.ts.monotonic"})
"""Attributes that carry a monotonic stamp: integer nanoseconds, double seconds."""
PORT_GRPC, PORT_PAGES = 4317, 9464
SEND_TIMEOUT_S, RETRY_S = 30.0, 1.0
POLL_S = 1.5
QUESTION, GPU_QUESTION = ({"prompt": 200, "output": 120, "itl": itl_ms} for itl_ms in (30.0, 10.0))
"""The load that the demo plans for at its end: chats, as in docs/quickstart.md."""
_RETRYABLE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_DATA, _PACKED = Path(__file__).resolve().parents[2] / "tests" / "data", Path(__file__).with_name("recordings")
_CELL = 22
KV_READ_NS = 131_072 / 3350.0
"""Of a token: bytes of keys and values in Llama 3.1 8B, by the bytes that an H100 reads in a nanosecond."""
_FOREVER_NS = 1 << 62


# --- the recording ----------------------------------------------------------------------------------------------------


class Stamps(NamedTuple):
    """How stamps change: ``unix_ns`` and ``mono_ns`` are added to the stamps of the two clocks.

    The machine is slower from ``slow_unix_ns`` on, which is ``slow_mono_ns`` by the other clock: what happened
    ``since_ns`` after it happens ``later_ns`` later, and what happened between two of these in proportion.
    """

    unix_ns: int = 0
    mono_ns: int = 0
    slow_unix_ns: int = 0
    slow_mono_ns: int = 0
    since_ns: Floats = np.zeros(1)
    later_ns: Floats = np.zeros(1)

    def unix_of(self, unix_ns: int) -> int:
        """A stamp of the wall clock."""
        return unix_ns + self.unix_ns + self._later_ns(unix_ns - self.slow_unix_ns)

    def mono_of(self, mono_ns: int) -> int:
        """A stamp of the monotonic clock."""
        return mono_ns + self.mono_ns + self._later_ns(mono_ns - self.slow_mono_ns)

    def _later_ns(self, since_ns: int) -> int:
        return round(float(np.interp(since_ns, self.since_ns, self.later_ns)))


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    return (span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans)


def restamped(payload: bytes, stamps: Stamps, engine: str = "") -> bytes:
    """An export with its stamps changed, and the name of its engine if one is given."""
    request = ExportTraceServiceRequest.FromString(payload)
    for attribute in (attribute for resource in request.resource_spans for attribute in resource.resource.attributes):
        if engine and attribute.key == "service.instance.id":
            attribute.value.string_value = engine
    for span in _spans_of(request):
        span.start_time_unix_nano = stamps.unix_of(span.start_time_unix_nano)
        span.end_time_unix_nano = stamps.unix_of(span.end_time_unix_nano)
        for event in span.events:
            event.time_unix_nano = stamps.unix_of(event.time_unix_nano)
        for attribute in chain(span.attributes, *(event.attributes for event in span.events)):
            value = attribute.value
            if attribute.key in MONOTONIC_NS_KEYS:
                value.int_value = stamps.mono_of(value.int_value)
            elif attribute.key in MONOTONIC_S_KEYS:
                value.double_value = stamps.mono_of(round(value.double_value * 1e9)) / 1e9
    return request.SerializeToString()


class Sending(NamedTuple):
    """One export, and when to send it, counted from the start."""

    after_s: float
    recorded_s: float
    payload: bytes


def find_recording(*, gpu: bool = False) -> Path:
    """The recording that comes along: it lies in a checkout, or in an installed package."""
    file = Path("simulated/h100" if gpu else "c10_long", "otlp.pb.gz")
    return next(filter(Path.is_file, (_DATA / file, _PACKED / file)), _PACKED / file)


Tape = Sequence[tuple[int, bytes]]
"""Exports in order, each with the newest end of a span so far."""


def read_tape(recording: Path) -> Tape:
    """The exports of a recording."""
    timed = Recording(recording, print_stderr)
    return [(unix_nano, said.payload) for unix_nano, _, said in timed if isinstance(said, Export)]


class Slowdown(NamedTuple):
    """What takes how many times as long from the middle of a recording on.

    ``throttle``: everything, as when the power of the machine is capped. ``kv_reads``: reading the KV cache in decode.
    Where that takes more than five times as long, the load that moves is told as further changes (docs/slower.md).
    """

    throttle: float = 1.0
    kv_reads: int = 1

    def stamps(self, tape: Tape) -> Stamps:
        """How the stamps of its machine change."""
        middle_unix_ns, ahead_ns, steps = (tape[0][0] + tape[-1][0]) // 2, 0, []
        spans = (span for _, payload in tape for span in _spans_of(ExportTraceServiceRequest.FromString(payload)))
        for event in (event for span in spans for event in span.events):
            said = {each.key: each.value.int_value for each in event.attributes}
            if "step.ts_start_ns" in said:
                ahead_ns = ahead_ns or event.time_unix_nano - said["step.ts_start_ns"]
                since_ns = said["step.ts_start_ns"] + ahead_ns - middle_unix_ns
                steps.append((since_ns, said.get("batch.context_tokens_single", 0)))
        slow = sorted(step for step in steps if step[0] >= 0)
        since = np.array([0, *(since_ns for since_ns, _ in slow), _FOREVER_NS], np.float64)
        read_tokens = np.cumsum([0, 0, *(context for _, context in slow)])  # before each of these moments
        later_ns = (self.throttle - 1.0) * since + (self.kv_reads - 1.0) * KV_READ_NS * read_tokens
        return Stamps(0, 0, middle_unix_ns, middle_unix_ns - ahead_ns, since, later_ns)


AS_RECORDED = Slowdown()


def schedule(
    tape: Tape, speed: float, clock: Clock, slowdown: Slowdown = AS_RECORDED, engine: str = ""
) -> Iterator[Sending]:
    """The exports of a tape as they should be sent from now on, with the stamps of ``clock``.

    They are sent ``speed`` times faster than recorded, of ``engine`` if that is given.
    """
    slow = slowdown.stamps(tape)
    times = [slow.unix_of(unix_nano) for unix_nano, _ in tape]
    shift_ns = clock.unix_nano() + int((times[-1] - times[0]) / speed) - times[-1]
    stamps = slow._replace(unix_ns=shift_ns, mono_ns=shift_ns)
    for unix_nano, (_, payload) in zip(times, tape, strict=True):
        recorded_s = (unix_nano - times[0]) / 1e9
        yield Sending(recorded_s / speed, recorded_s, restamped(payload, stamps, engine))


def send(target: str, sendings: Iterable[Sending], clock: Clock, watch: Callable[[float], None]) -> None:
    """Send each export when it is due; ``watch`` is called with the recorded seconds while there is time.

    Raises:
        StartError: nothing answers in time, or an export is refused for good.
    """
    pause, start_ns, recorded_s = threading.Event(), clock.monotonic_ns(), 0.0
    with grpc.insecure_channel(target) as channel:
        export: Callable[..., bytes] = channel.unary_unary(METHOD)
        for sending in sendings:
            while (early_s := sending.after_s - (clock.monotonic_ns() - start_ns) / 1e9) > 0:
                watch(recorded_s)
                pause.wait(min(early_s, POLL_S))
            while not _is_taken(export, sending.payload):
                pause.wait(RETRY_S)
            recorded_s = sending.recorded_s
        watch(recorded_s)


def _is_taken(export: Callable[..., bytes], payload: bytes) -> bool:
    """Whether the sidecar took it, rather than asking for patience."""
    try:
        export(payload, timeout=SEND_TIMEOUT_S, wait_for_ready=True)
    except grpc.RpcError as error:
        if error.code() not in _RETRYABLE:
            raise StartError(f"the sidecar took no export: {error.code().name}") from None
        return False
    return True


# --- the sidecar ------------------------------------------------------------------------------------------------------


def forget_last_run(directory: Path) -> None:
    """A directory without what the last demo left: the same span ids come again, and who knows them learns nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (SNAPSHOT_NAME, STATE_NAME):
        (directory / name).unlink(missing_ok=True)


def _port(wanted: int) -> int:
    """The well-known port, or 0, which is any, if somebody has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted


class _Patient(Config, frozen=True, kw_only=True):
    """Nobody waits for a demo's end, however slow the machine: what was sent is learned."""

    drain_s = 60.0


@contextlib.contextmanager
def running_sidecar(directory: Path, clock: Clock) -> Iterator[Sidecar]:
    """A sidecar on loopback that publishes every half second, logs to a file, and is drained at the end."""
    logger, handler = logging.getLogger(), logging.FileHandler(directory / "sidecar.log", mode="w")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before, logger.handlers = logger.handlers, [handler]
    listen, pages = f"127.0.0.1:{_port(PORT_GRPC)}", f"127.0.0.1:{_port(PORT_PAGES)}"
    config = _Patient(listen=listen, listen_http="", pages=pages, directory=str(directory), publish_interval_s=0.5)
    sidecar = Sidecar(config, clock)
    try:
        with running(sidecar):
            yield sidecar
    finally:
        logger.handlers = before
        handler.close()


def demo(
    tape: Tape,
    speed: float,
    directory: Path,
    slowdown: Slowdown = AS_RECORDED,
    *,
    gpu: bool = False,
) -> int:
    """Run the demo to its end or to Ctrl-C; the exit code says whether anything was learned.

    ``gpu``: the tape is of the simulated server, and the directory names its engine.
    """
    clock, question = Clock(), GPU_QUESTION if gpu else QUESTION
    directory = directory.absolute()
    engine = directory.name if gpu else ""
    forget_last_run(directory)
    table, interrupted = LearningTable(), False
    try:
        with running_sidecar(directory, clock) as sidecar:
            listen, pages = f"127.0.0.1:{sidecar.grpc_port}", f"127.0.0.1:{sidecar.http_port}"
            sender = "vLLM on an H100 would send" if gpu else "a real vLLM once sent"
            print_stdout(f"A real sidecar is running; it is sent what {sender}, {speed:g}x faster.")
            for what, factor in zip(("everything", "reading the KV cache"), slowdown, strict=True):
                if factor != 1.0:
                    print_stdout(f"From the middle of the recording on {what} takes {factor:g} times as long.")
            print_stdout(f"  OTLP/gRPC  {listen}")
            print_stdout("\n".join(f"  http://{pages}/{page}" for page in ("", "metrics", "snapshot", "healthz")))
            print_stdout("What one step costs, as the evidence comes in; ± is half of a 95 % interval. Ctrl-C ends it.")
            watch = watch_of(table, f"http://{pages}", clock)
            send(listen, schedule(tape, speed, clock, slowdown, engine), clock, watch)
    except KeyboardInterrupt:
        interrupted = True
        print_stdout("stopping")
    learned = conclude(directory / SNAPSHOT_NAME, table, question)
    return EXIT_OK if learned or interrupted else EXIT_FAILED


class LearningTable:
    """The table of the step's coefficients: a line where rows were learned since the last one."""

    def __init__(self) -> None:
        self._rows, self._titles = 0, ""

    def add(self, when: str, configs: Iterable[tracefit.Config]) -> None:
        """Print what is new in the first configuration that has learned more."""
        found = [published(each.targets[STEP_TIME]) for each in configs if STEP_TIME in each.targets]
        for model in [each[0] for each in found if each and each[0].rows > self._rows][:1]:
            self._rows = model.rows
            titles = _line("recorded", "rows", [each.name for each in model.coefficients], "error")
            if titles != self._titles:
                print_stdout(titles)
            self._titles = titles
            texts = [estimate(each.value, each.stderr, each.unit) for each in model.coefficients]
            print_stdout(
                _line(when, f"{model.rows:,}", texts, "" if model.median_ape is None else percent(model.median_ape))
            )


def _line(when: str, rows: str, cells: Iterable[str], error: str) -> str:
    return f"{when:>9} {rows:>6}{''.join(f' {cell:>{_CELL}}' for cell in cells)} {error:>6}"


def watch_of(table: LearningTable, address: str, clock: Clock) -> Callable[[float], None]:
    """What asks the sidecar for new coefficients, every 1.5 s at most."""
    due_ns = 0

    def watch(recorded_s: float) -> None:
        nonlocal due_ns
        if clock.monotonic_ns() < due_ns:
            return
        due_ns = clock.monotonic_ns() + int(POLL_S * 1e9)
        with contextlib.suppress(tracefit.LoadError):
            table.add(f"{recorded_s:.0f} s", tracefit.load(address).configs)

    return watch


def conclude(path: Path, table: LearningTable, question: Mapping[str, float]) -> bool:
    """What was learned at the end, the verdict on it, and what one asks of it next; False if nothing was."""
    if not path.is_file():
        print_stdout("nothing was learned")
        return False
    snapshot = tracefit.load(path)
    table.add("end", snapshot.configs)
    for config in snapshot.configs:
        for line in shown_lines(config, snapshot.created_unix_nano, only=STEP_TIME):
            print_stdout(line)
    print_stdout("\nChats of {prompt} tokens in and {output} out, {itl:g}ms between tokens:".format(**question))
    report = ask(snapshot, read_plan(question))
    print_stdout("\n".join([*report.lines, *report.notes]))
    print_stdout(f"\nsnapshot: {path} (ask it: tracefit show, predict, plan)")
    return True
