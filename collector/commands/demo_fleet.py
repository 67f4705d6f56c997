"""``tracefit demo --fleet``: ten real sidecars, one of them beside a machine that is slower, pulled and compared.

Each gets the same recording under a name of its own, less another tenth of its exports, as fast as it takes them. The
slow one's clocks run 15 % longer, from its first step on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.config import Config
from collector.fleet.pull import Pulled, Puller, PullOptions
from collector.receive.otlp import METHOD
from collector.recordings import Recording
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError, SystemClock

from .demo import Ports, await_ready, free_port, make_empty, sidecar_process
from .demo_feed import SEND_TIMEOUT_S, find_recording
from .demo_stamps import MONOTONIC_NS_KEYS, Slowdown, restamp, spans_of

SIDECARS, SLOW, SLOWER = 10, 7, 1.15
STATE_S = 1.0
ROUNDS_MAX = 40
_ID = "service.instance.id"
_SETTINGS = {
    "EXPORTERS__HTTP__STATE": "true",
    "STATE__INTERVAL_S": f"{STATE_S:g}",
    "LEARNERS": "[rls]",  # a third of the memory
}


def demo_fleet(recording: Path | None, say: PrintLine, directory: Path | None = None) -> int:
    """Run it; failed if the slow one is not named, or another one is."""
    source = find_recording(recording)
    directory = (directory or Path("snapshots", "demo-fleet")).absolute()
    with contextlib.ExitStack() as stack:
        say(f"Starting {SIDECARS} sidecars; sidecar-{SLOW} is beside a machine that takes {SLOWER:g} times as long.")
        every = []
        for number in range(SIDECARS):
            ports, home = Ports(free_port(), free_port()), directory / f"sidecar-{number}"
            make_empty(home, *home.glob("*"))
            every.append((ports, home, stack.enter_context(sidecar_process(ports, home, **_SETTINGS))))
        for ports, home, process in every:
            await_ready(process, ports.pages, home)
        _feed(source, [ports.grpc for ports, _, _ in every], say)
        sources = tuple(f"http://127.0.0.1:{ports.pages}" for ports, _, _ in every)
        pulled = _pull(PullOptions(sources, directory / "fleet"), say)
    return _conclude(pulled, directory / "fleet", say)


def _feed(source: Path, ports: Sequence[int], say: PrintLine) -> None:
    sent = 0
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(ports), "fleet-feed") as pool:
        channels = [stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")) for port in ports]
        calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [channel.unary_unary(METHOD) for channel in channels]
        for number, (even, stretched) in enumerate(exports_of_two_machines(source, say)):
            hearing = [index for index in range(len(calls)) if (number + index) % SIDECARS or number == 0]
            payloads = [named_export(stretched if index == SLOW else even, index) for index in hearing]
            asked = [
                pool.submit(calls[index], payload, timeout=SEND_TIMEOUT_S, wait_for_ready=True)
                for index, payload in zip(hearing, payloads, strict=True)
            ]
            try:
                sent += sum(each.result() is not None for each in asked)
            except grpc.RpcError as error:
                raise StartError(f"a sidecar refused an export: {error.code().name}") from None
    say(f"{sent} exports of {source.parent.name} sent, nine tenths of it to each.")


def exports_of_two_machines(
    source: Path, say: PrintLine
) -> Iterator[tuple[ExportTraceServiceRequest, ExportTraceServiceRequest]]:
    """Each export as it was, and as the slow machine would have sent it."""
    slow: Slowdown | None = None
    for timed in Recording(source, say).exports():
        even = ExportTraceServiceRequest.FromString(timed.export.payload)
        slow = slow or _slow_from_first_step(even)
        stretched = ExportTraceServiceRequest()
        stretched.CopyFrom(even)
        if slow is not None:
            restamp(stretched, slow)
        yield even, stretched


def _slow_from_first_step(request: ExportTraceServiceRequest) -> Slowdown | None:
    for span in spans_of(request):
        for event in span.events:
            for attribute in event.attributes:
                if attribute.key in MONOTONIC_NS_KEYS:
                    return Slowdown(event.time_unix_nano, attribute.value.int_value, SLOWER)
    return None


def named_export(request: ExportTraceServiceRequest, number: int) -> bytes:
    """The export under an engine's name of its own."""
    for resource in request.resource_spans:
        for attribute in resource.resource.attributes:
            if attribute.key == _ID:
                attribute.value.string_value = f"engine-{number}"
    return request.SerializeToString()


def _pull(options: PullOptions, say: PrintLine) -> Pulled:
    """Pull until every sidecar has a state and none has a newer one."""
    puller = Puller(options, Config(learners=("rls",)), SystemClock(), say)
    pause = threading.Event()
    puller.start()
    try:
        before: list[int] = []
        for _ in range(ROUNDS_MAX):
            pulled = puller.pull()
            rows = [source.rows for source in pulled.sources]
            if all(rows) and rows == before:
                break
            before = rows
            pause.wait(2.5 * STATE_S)
    finally:
        puller.stop()
    return pulled


def _conclude(pulled: Pulled, out: Path, say: PrintLine) -> int:
    replicas = {
        replica.engine: replica
        for config in (pulled.snapshot.configs if pulled.snapshot else ())
        for replica in (config.targets["step_time"].replicas if "step_time" in config.targets else ())
    }
    say("")
    say(f"{'source':<30} {'engine':<10} {'rows':>6} {'time / others':>14}")
    for source in pulled.sources:
        replica = replicas.get(source.engines[0]) if source.engines else None
        if replica is None or replica.ratio is None or replica.stderr is None:
            say(f"{source.name:<30} {source.outcome} {source.detail}")
            continue
        mark = "   <- differs" if replica.differs else ""
        ratio = f"{replica.ratio:>14.3f} ± {replica.stderr:.3f}"
        say(f"{source.name:<30} {replica.engine:<10} {replica.rows:>6} {ratio}{mark}")
    say("")
    say(f"fleet: {out / 'snapshot.json'}")
    named = {engine for engine, replica in replicas.items() if replica.differs}
    return EXIT_OK if named == {f"engine-{SLOW}"} else EXIT_FAILED
