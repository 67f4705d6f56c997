"""``tracefit demo``: a real sidecar in its own process on real ports, fed with a recording of a real server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from collector.config import ENV_PREFIX
from collector.durable import STATE_FILES
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, PrintLine, StartError, Stop, SystemClock
from exporters.charts import Z_95
from exporters.snapshot_file import SNAPSHOT_NAME
from exporters.wording import unit_text
from online import FeatureSnapshot, ModelSnapshot, Snapshot

from .demo_feed import Feeder, find_recording, schedule
from .report import lines

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
        "TRACEFIT_RECEIVERS__GRPC__ENDPOINT": f"127.0.0.1:{ports.grpc}",
        "TRACEFIT_RECEIVERS__HTTP__ENABLED": "false",
        "TRACEFIT_EXPORTERS__HTTP__ENDPOINT": f"127.0.0.1:{ports.pages}",
        "TRACEFIT_SNAPSHOT__DIRECTORY": str(directory),
        "TRACEFIT_SNAPSHOT__PUBLISH_INTERVAL_S": "0.5",
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
