"""Every member of every closed set is reached by the product's own code: a row of a counter that no input can raise
says "never" where it means "nobody looks".

A case runs a part of the product and gives what that counted; each says which members it must reach. A new member
without a case fails, and so does a case whose input no longer raises what it promises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import http.client
import inspect
import itertools
import math
import socket
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import NamedTuple

import grpc
import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from collector.config import (
    ConfigurationsConfig,
    DedupeConfig,
    HttpReceiverConfig,
    JoinConfig,
    KvEndpoint,
    RuleConfig,
    ScrapeConfig,
    ScrapeEndpoint,
)
from collector.config.learning_config import BankConfig
from collector.decode.kv import count_batch, read_frames
from collector.decode.kv.messages import read_payload
from collector.decode.pages import EngineReading, Flavour, Meaning
from collector.decode.records import STEP_DTYPE, CoreSpan, Mark, MarkKind, Telemetry
from collector.durable.image import PROGRESS
from collector.durable.image import Progress as SavedProgress
from collector.durable.store import NAME, PREVIOUS_NAME, StateStore
from collector.fleet import state_fetch
from collector.fleet.pull import Puller, PullOptions
from collector.identity.discovery import Access, fetch
from collector.identity.knowledge import Knowledge
from collector.join.joiner import Joiner
from collector.join.kv.timeline import KvTimeline
from collector.join.pages import PageEngine
from collector.receive.admission import AdmissionQueue
from collector.receive.count import FIELDS_MAX, SPANS_MAX
from collector.receive.export_request import Export
from collector.receive.intake import Intake
from collector.receive.kv.kv_zmq import _Subscription
from collector.receive.otlp.otlp_http import CONTENT_TYPE, make_http_receiver
from collector.receive.otlp.way_in import WayIn
from collector.receive.scrape import Scraper
from collector.runtime.clock import SystemClock
from collector.runtime.health import Health
from collector.telemetry import Counts, Metrics, reasons, table
from collector.telemetry.counts import metric_of
from collector.telemetry.reasons import (
    Direction,
    DiscoveryOutcome,
    JoinEvent,
    KvSkip,
    Outcome,
    Phase,
    PluginLoss,
    PullOutcome,
    Restored,
    RowDrop,
    ScrapeOutcome,
    SequenceEvent,
    Skip,
    Stall,
    Transport,
    Wait,
)
from collector.worker.stall import StallWatch, WorkerProgress
from online.rows import RowOutcome, Target
from online.state import Taken
from tests.support.clocks import FakeClock, eventually
from tests.support.fleets import CONFIG as FLEET_CONFIG
from tests.support.fleets import NOW_NS, state_of, state_server
from tests.support.kv_batches import kv_batches, stored
from tests.support.kv_joins import telemetry
from tests.support.otlp_load import Stream
from tests.support.page_server import PageServer, recorded_pages
from tests.support.pipelines import new_pipeline, replayed
from tests.support.sidecars import call_export, running_sidecar
from tests.support.step_exports import attribute, make_export
from tests.support.toy_engine import Job, many_jobs, run_engine
from tests.support.toy_spans import (
    CORE_SCOPE,
    STEP_SCOPE,
    STOCK_SCOPE,
    Piece,
    core_span,
    export_of,
    exports_of,
    pieces,
    step_span,
    stock_span,
)

Reached = Iterable[enum.StrEnum]


class Case(NamedTuple):
    """A run of a part of the product, and what it must count."""

    run: Callable[..., Reached]
    members: tuple[enum.StrEnum, ...]


def labels_of(counts: Counts) -> list[enum.StrEnum]:
    return [
        label for row, count in counts.items() if count and row is not metric_of(row) for label in row[1:]
    ]  # fmt: skip


def process(pipeline, *group: Piece) -> None:
    pipeline.process([Export(export_of(group).SerializeToString(), "peer", "test", len(group))])


# --- spans and their events -------------------------------------------------------------------------------------------


def odd_spans() -> Reached:
    run = run_engine(many_jobs(3))
    pipeline, numbers = new_pipeline(dedupe=DedupeConfig(window_s=600)), itertools.count()

    def odd(change, scope=STEP_SCOPE):
        span = step_span(run, 1, 3)
        span.span_id = next(numbers).to_bytes(8, "big")
        change(span)
        process(pipeline, Piece("engine", scope, span))
        return span

    def set_value(key, **value):
        def change(span):
            for each in span.events[0].attributes:
                if each.key == key:
                    each.value.Clear()
                    for kind, content in value.items():
                        setattr(each.value, kind, content)

        return change

    def remove(span):
        del span.events[0].attributes[:]

    odd(lambda _: None, scope="another")
    odd(lambda span: setattr(span, "name", "painting"))
    odd(lambda span: setattr(span.events[0], "name", "painted"))
    odd(lambda span: setattr(span, "start_time_unix_nano", span.end_time_unix_nano + 1))
    odd(lambda span: span.attributes.extend(attribute(str(n), n) for n in range(200)))
    odd(lambda span: span.attributes.extend(attribute(f"plugin.{loss}", 1) for loss in PluginLoss))
    odd(remove)
    odd(set_value("step.id", string_value="7"))
    odd(set_value("kv.usage_gpu_ratio", double_value=math.nan))
    odd(set_value("batch.prefill_tokens", int_value=-1))
    odd(set_value("batch.prefill_tokens", int_value=2**20))
    sound = odd(lambda _: None)
    process(pipeline, Piece("engine", STEP_SCOPE, sound))
    bare = core_span(run, run.jobs[0])
    del bare.events[:]
    process(pipeline, Piece("engine", CORE_SCOPE, bare))
    odd(lambda span: setattr(span, "end_time_unix_nano", span.end_time_unix_nano + 3600 * 10**9))
    odd(lambda _: None)
    return labels_of(pipeline.take_counts())


# --- the join ---------------------------------------------------------------------------------------------------------


def two_runs_of_one_engine() -> Reached:
    """An API half that never came, a restart with its compilation, idle time, prompts half a window apart."""
    jobs = many_jobs(64)
    for index, job in enumerate(jobs):
        job.queued_step += 400 * (index // 8)
    before = run_engine(jobs, idle_us=30e6)
    end_ns = before.summaries[-1]["step.ts_end_ns"] + 2 * 10**9
    after = run_engine(many_jobs(50, seed=3), start_ns=end_ns)
    slow = 12 * 10**9
    for summary in after.summaries[2:]:
        summary["step.ts_start_ns"] += slow
        summary["step.ts_end_ns"] += slow
    after.jobs = []
    return labels_of(replayed(exports_of(pieces(before, apis=False) + pieces(after), 5)).take_counts())


def steps_out_of_place() -> Reached:
    """Ids that jump; two engines under one name; a step that is repeated; a clock that goes back."""
    run, other = run_engine(many_jobs(60)), run_engine(many_jobs(60, seed=5), start_ns=10**12 + 700_000)
    newest = len(run.summaries)
    jumps = step_span(run, newest - 60, newest)
    for index, event in enumerate(jumps.events):
        set_int(event, "step.id", lambda value, far=10**9 * (1 + (index > 30)): value + far)
    # each as far as belongs to the same process still, and faster than a hole is final
    far_apart = [step_span(run, number, number) for number in (newest - 60, newest - 59)]
    far = JoinConfig().steps_max - 1
    for index, span in enumerate(far_apart, 1):
        set_int(span.events[0], "step.id", lambda value, index=index: value + index * far)
    repeats = step_span(run, 1, 60)
    repeats.events.extend(step_span(run, 1, 60).events)
    mixed = step_span(run, 1, 60)
    mixed.events.extend(step_span(other, 301, 360).events)
    for ours, theirs in zip(mixed.events[:60], mixed.events[60:], strict=True):
        theirs.time_unix_nano = ours.time_unix_nano + 1
    back = step_span(run, 1, 300)
    for event in back.events[150:]:
        for key in ("step.ts_start_ns", "step.ts_end_ns"):
            set_int(event, key, lambda value: value - 900 * 10**9)
    out: list[enum.StrEnum] = []
    for spans in (
        [step_span(run, 1, newest - 61), jumps],
        [step_span(run, 1, newest - 61), *far_apart],
        [repeats],
        [mixed],
        [back],
    ):
        pipeline = new_pipeline(join=JoinConfig(window_s=1.0, grace_s=0.5))
        for span in spans:
            process(pipeline, Piece("engine", STEP_SCOPE, span))
        pipeline.flush()
        out += labels_of(pipeline.take_counts())
    return out


def set_int(event, key, change) -> None:
    for each in event.attributes:
        if each.key == key:
            each.value.int_value = change(each.value.int_value)


def journeys_out_of_place() -> Reached:
    """Summaries that disagree with journeys; a journey from before the window; one that was never scheduled."""
    run = run_engine([Job("long", 8, 1200), *many_jobs(60)])
    without = [piece for piece in pieces(run) if piece.span.span_id != core_span(run, run.jobs[0]).span_id]
    pipeline = new_pipeline(join=JoinConfig(window_s=1.0, grace_s=0.5))
    for export in exports_of(without, 3):
        pipeline.process([export])
    process(pipeline, Piece("engine-0", CORE_SCOPE, core_span(run, run.jobs[0])))
    never = core_span(run, run.jobs[1])
    never.span_id = b"no steps"
    del never.events[1:]
    process(pipeline, Piece("engine-0", CORE_SCOPE, never))
    pipeline.flush()
    return labels_of(pipeline.take_counts())


def too_many() -> Reached:
    """More engines and more open requests than are held: one while the other is alive, and one when it is gone."""
    joiner = Joiner(JoinConfig(engines_max=1, requests_max=100, grace_s=1e5, window_s=80_000))
    for engine, later_ns in (("a", 0), ("b", 10**9), ("c", 10**14)):
        spans = []
        for number in range(200):
            ns, ids = 10**12 + number * 10**6 + later_ns, number.to_bytes(8, "big")
            marks = (Mark(MarkKind.SCHEDULED, number + 1, ns, 0), Mark(MarkKind.FINISHED, number + 1, ns, 1))
            spans.append(CoreSpan(ids, ids, b"t" * 16, "", 10, marks, None, 10**18, ns + 10**18))
        joiner.add(Telemetry(engine, {}, core=spans))
        list(joiner.drain())
    return labels_of(joiner.take_counts())


def short_of_memory() -> Reached:
    pipeline = new_pipeline()
    process(pipeline, Piece("engine", STEP_SCOPE, step_span(run_engine(many_jobs(60)), 1, 200)))
    pipeline.give_up_oldest()
    return labels_of(pipeline.take_counts())


def two_emitters() -> Reached:
    run = run_engine(many_jobs(80))
    exact = []
    for summary, context in zip(run.summaries, run.context_tokens, strict=True):
        exact.append(dict(summary) | {"step.ts_start_ns": summary["step.ts_start_ns"] + 1000})
        exact[-1]["batch.context_tokens"] = exact[-1]["batch.context_tokens_single"] = context
        exact[-1] |= dict.fromkeys(("batch.context_tokens_multi", "batch.num_multi_reqs", "batch.multi_tokens"), 0)
    plugin = dataclasses.replace(run, summaries=exact, jobs=[])
    return labels_of(replayed(exports_of(pieces(run, instance="a") + pieces(plugin, instance="b"))).take_counts())


def two_processes_of_one_id() -> Reached:
    joiner = Joiner(JoinConfig())
    for number in range(6):
        steps = np.zeros(1, STEP_DTYPE)
        steps["step_id"], steps["unix_ns"], steps["ts_start_ns"] = number + 1, (1 + number) * 10**9 + 10**18, 1
        joiner.add(Telemetry("engine", {}, steps=steps, process=1 + number % 2))
    return labels_of(joiner.take_counts())


def speculating() -> Reached:
    """Three tokens a step for each request that decodes, and nobody was preempted."""
    run = run_engine(many_jobs(40))
    for summary in run.summaries:
        more = 2 * summary["batch.num_decode_reqs"]
        summary["batch.decode_tokens"] += more
        summary["batch.scheduled_tokens"] += more
    pipeline = replayed(exports_of(pieces(run)))
    assert pipeline.snapshot(0, 1).configs[0].config["speculative_decoding"] is True
    return labels_of(pipeline.take_counts())


def stock_beside_steps() -> Reached:
    """Request spans beside one engine, then beside two; and some that are too long, too short, or broken."""
    out: list[enum.StrEnum] = []
    for engines in (1, 2):
        everything = [
            Piece("api", STOCK_SCOPE, stock_span(f"r{n}", n, prompt=9, outputs=5, ttft_s=0.5, decode_s=0.4))
            for n in range(20)
        ]
        for number in range(engines):
            everything += pieces(run_engine(many_jobs(40, seed=number)), instance=f"engine-{number}", apis=False)
        out += labels_of(replayed(exports_of(everything)).take_counts())
    pipeline = new_pipeline()
    process(pipeline, Piece("api", STOCK_SCOPE, stock_span("a", 0, prompt=5, outputs=10**6, ttft_s=1.0, decode_s=9.0)))
    process(pipeline, Piece("api", STOCK_SCOPE, stock_span("b", 1, prompt=5, outputs=0, ttft_s=1.0, decode_s=9.0)))
    pipeline.flush()
    return out + labels_of(pipeline.take_counts())


def sampled_request_spans() -> Reached:
    spans = [stock_span(f"r{n}", n, prompt=9, outputs=5, ttft_s=0.5, decode_s=0.4) for n in range(400)]
    kept = [span for span in spans if span.trace_id[8] < 256 // 10]
    return labels_of(replayed(exports_of([Piece("api", STOCK_SCOPE, span) for span in kept])).take_counts())


def contradicted() -> Reached:
    joiner = Joiner(JoinConfig(), Knowledge(ConfigurationsConfig(rules=(RuleConfig(facts={"gpu": "A10G"}),))))
    steps = np.zeros(1, STEP_DTYPE)
    steps["step_id"], steps["unix_ns"], steps["ts_start_ns"] = 1, 10**18, 1
    joiner.add(Telemetry("engine", {"hw.gpu.name": "NVIDIA L4"}, steps=steps))
    return labels_of(joiner.take_counts())


def waiting() -> Reached:
    """What is held at some moment of several streams, and what it waits for."""
    run = run_engine(many_jobs(60))
    steps = [Piece("engine", STEP_SCOPE, step_span(run, 1, len(run.summaries)))]
    journeys = [Piece("engine", CORE_SCOPE, core_span(run, job)) for job in run.jobs]
    hole = [Piece("engine", STEP_SCOPE, step_span(run, 1, len(run.summaries), keep=lambda step: step % 300))]
    exact = [
        Piece("engine", STEP_SCOPE, make_export(1, steps_per_span=n).resource_spans[0].scope_spans[0].spans[0])
        for n in (100, 900)
    ]
    stock = Piece("api", STOCK_SCOPE, stock_span("a", 0, prompt=5, outputs=9, ttft_s=1.0, decode_s=9.0))
    streams = (
        steps,
        [*steps, journeys[0]],
        [*steps, *journeys[:30]],
        [*hole, *journeys],
        exact[:1],
        exact[1:],
        [stock],
    )
    out: list[enum.StrEnum] = []
    for stream in streams:
        pipeline = new_pipeline()
        process(pipeline, *stream)
        out += [one.reason for one in pipeline.waiting()]
    pipeline, of_plugin = new_pipeline(), Stream(1, spans_per_rpc=1, pool_rpcs=40)
    for number in range(35):
        pipeline.process([Export(of_plugin.export(number).payload, "peer", Transport.GRPC, 1)])
    out += [one.reason for one in pipeline.waiting()]
    joiner = Joiner(JoinConfig())
    for batch in kv_batches("c5_offload"):
        joiner.kv.add(batch)
    for one in telemetry("c5_offload"):
        joiner.add(one)
    joiner.drain()
    return [*out, *(one.reason for one in joiner.waiting())]


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of_a_replay() -> Reached:
    """A healthy engine; one whose learner raises; rows with values that no step has."""
    preempted = Job("preempted", 300, 60, 5, preempted_step=20, resumed_step=40)
    pipeline = replayed(exports_of(pieces(run_engine([preempted, *many_jobs(60)]))))
    out = labels_of(pipeline.take_counts())
    learn = pipeline._bank.learn

    def odd(config_id, target, rows, engines=None):
        if len(rows) < 5:
            return learn(config_id, target, rows, engines)
        values = rows.elapsed_us.copy()
        values[:3] = math.nan, -1.0, 1e300
        raw = rows.raw.copy()
        raw[rows.offsets[3] : rows.offsets[4]] = math.nan
        return learn(config_id, target, dataclasses.replace(rows, elapsed_us=values, raw=raw), engines)

    for learning in (odd, lambda *_: 1 / 0):
        pipeline._bank.learn = learning
        first = 10**6 * (1 + (learning is not odd))
        run = run_engine(many_jobs(60), start_ns=10**15 + first * 10**9)
        for export in exports_of(pieces(run)):
            pipeline.process([export])
        pipeline.flush()
        out += labels_of(pipeline.take_counts())
    full = new_pipeline(bank=BankConfig(configs_max=1))
    for number, instance in enumerate(("first", "newcomer")):
        request = make_export(steps_per_span=200, first_step=1 + 1000 * number, instance=instance)
        full.process([Export(request.SerializeToString(), "peer", "grpc", 1)])
    full.flush()
    return out + labels_of(full.take_counts())


# --- KV events --------------------------------------------------------------------------------------------------------


def kv_events() -> Reached:
    def message(*events, seq=0, ts_s=1.8e9):
        return read_payload(msgspec.msgpack.encode([ts_s, list(events), 0, 1]), "kv", seq)

    sources = KvTimeline("kv", 0, 0, batches_max=16)
    out = [read_frames(frames, "kv") for frames in ([b"x"], [b"", b"\0" * 8, b"\xc1"])]
    out.append(message(ts_s=1.0))
    for seq in range(40):
        sources.add(message(stored(), ["Painted"], seq=seq, ts_s=1.8e9 + seq))
    out.append(sources.add(message(seq=39, ts_s=1.8e9 + 39)))
    out.append(sources.add(message(seq=1, ts_s=1.8e9 + 1)))
    moves = message(
        ["TransferInitiated", 1, "r", "GPU", "CPU", 8, 7],
        ["TransferCompleted", 1, "r", "GPU", "CPU", 8, True, 7],
        ["TransferCompleted", 2, "r", "CPU", "GPU", 8, False, 7],
        ["TransferInitiated", 3, "r", "CPU", "DISK", 8, 7],
        ["CacheLoadCommitted", "r", "CPU", 4, 8],
        ["CacheEviction", "CPU", 1, "lru", 7, None],
        ["RemoteTransferInitiated", 3, "r", "NIXL", 0, 1, 5],
    )
    counts = Counts()
    count_batch(counts, moves, None)
    count_batch(counts, message(["Painted"]), None)
    return [*filter(None, out), *labels_of(counts)]


def publisher_numbers() -> Reached:
    zmq = pytest.importorskip("zmq")
    counts = Counts()
    with zmq.Context() as context:
        subscription = _Subscription(zmq, context, KvEndpoint(endpoint="tcp://127.0.0.1:1"), 10)
        for seq in (0, 5, 0):
            subscription.count_number(0, seq, counts)
        subscription.sub.close()
    return labels_of(counts)


# --- calls ------------------------------------------------------------------------------------------------------------


class Calls:
    """An intake whose metrics tell how each call ended."""

    def __init__(self, **intake) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.queue = AdmissionQueue(FakeClock(), capacity_bytes=1 << 20, wait_s=0.0, waiters_max=6)
        self.intake = Intake(self.queue, self.metrics, **intake)

    def offer(self, payload: bytes) -> None:
        with contextlib.suppress(ZeroDivisionError):
            self.intake.offer(payload, "peer", Transport.HTTP)

    def outcomes(self, transport: Transport = Transport.HTTP) -> list[enum.StrEnum]:
        calls = {outcome: self.metrics.value(table.REQUESTS, transport, outcome) for outcome in Outcome}
        return [outcome for outcome, number in calls.items() if number] + [transport] * any(calls.values())


def offers() -> Reached:
    sound = make_export().SerializeToString()
    calls, short, broken = Calls(), Calls(memory=SimpleNamespace(is_short=lambda: True)), Calls(sync=failing)
    for payload in (sound, b"", b"\xff", b"\x0a\x00" * (SPANS_MAX + 1), b"\x10\x00" * (FIELDS_MAX + 1)):
        calls.offer(payload)
    full = Calls()
    full.queue.put(None, 1 << 20)
    full.offer(sound)
    calls.queue.close()
    calls.offer(sound)
    calls.queue.put = lambda *_: 1 / 0
    calls.offer(sound)
    short.offer(sound)
    broken.offer(sound)
    return calls.outcomes() + full.outcomes() + short.outcomes() + broken.outcomes()


def failing() -> None:
    raise OSError("disk")


def http_calls() -> Reached:
    """Calls over HTTP that never become an export: no token, too large, not OTLP, cut short."""
    calls, clock = Calls(), SystemClock()
    config = HttpReceiverConfig(endpoint="127.0.0.1:0", max_request_body_size_mib=1)
    tokens = SimpleNamespace(accepts=lambda header: header == "Bearer good")
    way_in = WayIn(Transport.HTTP, calls.intake, clock, tokens)
    server = make_http_receiver(config, way_in, health=Health(clock), clock=clock, grace_s=0)
    server.start()
    try:
        headers = {"Content-Type": CONTENT_TYPE, "Authorization": "Bearer good"}
        for changes in ({"Authorization": "Bearer bad"}, {"Content-Length": str(2 << 20)}, {"Content-Type": "text/x"}):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=100)) as connection:
                connection.request("POST", "/v1/traces", None, headers | {"Content-Length": "0"} | changes)
                connection.getresponse()
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            head = "\r\n".join(f"{name}: {value}" for name, value in (headers | {"Content-Length": "9"}).items())
            client.sendall(f"POST /v1/traces HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\nabc".encode())
        eventually(lambda: calls.metrics.value(table.REQUESTS, "http", Outcome.INCOMPLETE))
        return calls.outcomes()
    finally:
        server.stop()


def a_full_journal(tmp_path, monkeypatch) -> Reached:
    with running_sidecar(tmp_path, DURABILITY="journal", JOURNAL__CAPACITY_MIB="1") as sidecar:
        monkeypatch.setattr(sidecar._keeper, "_journal_waits", lambda: False)
        with contextlib.suppress(grpc.RpcError):
            for number in range(100):
                call_export(sidecar.grpc_port, make_export(50, first_step=1 + number * 500).SerializeToString())
        calls = {outcome: sidecar.metrics.value(table.REQUESTS, "grpc", outcome) for outcome in Outcome}
        return [Transport.GRPC, *(outcome for outcome, number in calls.items() if number)]


# --- the process ------------------------------------------------------------------------------------------------------


def stalls() -> Reached:
    out = []
    understood = {"spans_understood": 9}
    for later in ({"batches_failed": 3}, {}, understood, understood | {"rows_offered": 9}):
        clock = FakeClock()
        watch = StallWatch(clock, 600.0)
        watch.record(WorkerProgress())
        for _ in range(11):
            clock.advance(60)
            watch.record(WorkerProgress(**later))
        out.append(watch.stalled())
    return out


def restores(tmp_path) -> Reached:
    def load():
        store = StateStore(tmp_path)
        store.load(lambda _: [])
        return store.restored

    out = [load()]
    for seq in (10, 20):
        StateStore(tmp_path).write(Taken({PROGRESS: SavedProgress(seq=seq, generation=seq)}).pieces(), seq)
    out.append(load())
    (tmp_path / NAME).write_bytes(b"x")
    out.append(load())
    (tmp_path / NAME).write_bytes(b"x")
    (tmp_path / PREVIOUS_NAME).write_bytes(b"x")
    return [*out, load()]


class Answers(BaseHTTPRequestHandler):
    """``/302`` is answered with that status; ``/large`` with more than anybody reads."""

    def do_GET(self) -> None:
        status = int(self.path[1:]) if self.path[1:].isdigit() else 200
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"x" * (3 * 2**20 if self.path == "/large" else 1))

    def log_message(self, *_) -> None:
        """Nothing on stderr."""


def questions() -> Reached:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        out = [fetch(base, path, Access(5.0), SystemClock())[0] for path in ("/200", "/302", "/500", "/large")]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        out.append(fetch(silent, "/", Access(0.05), SystemClock())[0])
    out.append(fetch(silent, "/", Access(5.0), SystemClock())[0])
    return [*out, fetch("http://127.0.0.1:99999", "/", Access(5.0), SystemClock())[0]]


def answer_oddly(listener: socket.socket) -> None:
    """One answer that is no HTTP."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(b"not HTTP\r\n\r\n")


def scrapes() -> Reached:
    page = recorded_pages()[-1][1]
    answers = {
        "/taken": (200, {}, page),
        "/hangs": (200, {}, None),
        "/redirect": (302, {"Location": "/"}, b""),
        "/refused": (500, {}, b""),
        "/unauthenticated": (403, {}, b""),
        "/large": (200, {"Content-Length": str(2**30)}, b""),
        "/cut": (200, {}, page[:-3]),
        "/html": (200, {}, b"<html></html>\n"),
        "/nan": (200, {}, page.replace(b"792.0", b"NaN")),
        "/other": (200, {}, b"go_goroutines 1\n"),
        "/renamed": (200, {}, page.replace(b"num_requests_running", b"now_running")),
        "/engines": (200, {}, b"".join(page.replace(b'engine="0"', b'engine="%d"' % n) for n in range(70))),
    }
    with PageServer(lambda path, _: answers[path]) as server:
        urls = [f"http://127.0.0.1:{server.port}{path}" for path in answers]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/metrics"
        with socket.create_server(("127.0.0.1", 0)) as mute:
            threading.Thread(target=answer_oddly, args=(mute,), daemon=True).start()
            strange = f"http://127.0.0.1:{mute.getsockname()[1]}/metrics"
            endpoints = tuple(ScrapeEndpoint(url=url) for url in (*urls, nobody, strange))
            pace = {"interval_s": 0.05, "interval_min_s": 0.05, "timeout_s": 0.3, "queue_pages": 1, "threads": 8}
            out: list[ScrapeOutcome] = []
            scraper = Scraper(ScrapeConfig(endpoints=endpoints, **pace), SystemClock(), out.append)
            scraper.start()
            eventually(lambda: set(out) == set(ScrapeOutcome))
            scraper.stop()
    return out


def preempted_between_two_pages() -> Reached:
    engine, values = PageEngine("server", "", 0), [100.0] * len(Meaning)
    for number in range(1, 3):
        values = [value + 10.0 * number for value in values]
        values[Meaning.RUNNING] = 0.0
        engine.add(number * 10**9, number * 10**9, EngineReading("0", "m", Flavour.VLLM, tuple(values), {}))
    return engine.take_counts().by_label(table.DROPPED_ROWS)


def two_servers_at_one_address() -> Reached:
    engine = PageEngine("server", "", 0)
    for number, total in enumerate((100.0, 900.0, 110.0, 910.0), 1):
        values = tuple([total] * len(Meaning))
        engine.add(number * 10**9, number * 10**9, EngineReading("0", "m", Flavour.VLLM, values, {}))
    return engine.take_counts().by_label(table.DROPPED_ROWS)


def pulls(tmp_path, monkeypatch) -> Reached:
    monkeypatch.setattr(state_fetch, "STATE_BYTES_MAX", 200_000)
    clock = FakeClock(unix_nano=NOW_NS)

    def drip(_path, _elapsed_s):
        clock.advance(60)
        return 200, {}, b"x"

    served = {
        "good": state_of("a", 1, rows=80),
        "past": state_of("a", 1, rows=70),
        "future": state_of("b", 1, rows=80, begin_ns=2 * NOW_NS),
        "damaged": b"no state",
        "large": b"x" * 200_001,
        "closed": 401,
        "off": 404,
        "young": 503,
    }
    with state_server(served) as server, PageServer(drip) as dripping:
        urls = [f"http://127.0.0.1:{server.port}/{name}" for name in served]
        outcomes = []
        for sources in ((*urls, str(tmp_path / "nowhere.bin")), (f"http://127.0.0.1:{dripping.port}/state",)):
            puller = Puller(PullOptions(sources, tmp_path / "fleet", timeout_s=30), FLEET_CONFIG, clock, print)
            puller.start()
            outcomes += [PullOutcome(source.outcome) for source in puller.pull().sources]
            puller.stop()
    return outcomes


CASES = (
    Case(odd_spans, (*Skip, *PluginLoss)),
    Case(two_runs_of_one_engine, (
        RowDrop.IDLE, RowDrop.WARM_UP, JoinEvent.ENGINE_RESTART, JoinEvent.API_UNMATCHED, JoinEvent.STEP_MATCHED,
    )),
    Case(steps_out_of_place, (
        JoinEvent.STEP_LATE, JoinEvent.STEP_DUPLICATE, JoinEvent.ENGINE_CONFLICT, RowDrop.TIME_ORDER, RowDrop.RESTART,
        JoinEvent.STEP_MISSING,
    )),
    Case(journeys_out_of_place, (
        JoinEvent.STEP_MISMATCHED, JoinEvent.JOURNEY_LATE, JoinEvent.JOURNEY_UNSCHEDULED,
    )),
    Case(too_many, (JoinEvent.ENGINE_EVICTED, JoinEvent.ENGINE_REFUSED, JoinEvent.OPEN_REQUESTS_EVICTED)),
    Case(short_of_memory, (JoinEvent.STEP_GIVEN_UP,)),
    Case(two_emitters, (JoinEvent.DOUBLE_EMITTER,)),
    Case(two_processes_of_one_id, (JoinEvent.ID_SHARED,)),
    Case(speculating, (JoinEvent.SPECULATIVE_STEP,)),
    Case(stock_beside_steps, (
        RowDrop.TOLD_BY_STEPS, RowDrop.WHICH_CONFIG, RowDrop.TOO_LONG, RowDrop.INCOMPLETE,
    )),
    Case(sampled_request_spans, (RowDrop.SAMPLED_SPANS,)),
    Case(contradicted, (JoinEvent.FACT_CONFLICT,)),
    Case(waiting, tuple(Wait)),
    Case(rows_of_a_replay, (*RowOutcome, *Target)),
    Case(kv_events, (*KvSkip, *Direction, *Phase)),
    Case(publisher_numbers, tuple(SequenceEvent)),
    Case(offers, (
        Outcome.SUCCESS, Outcome.EMPTY, Outcome.UNDECODABLE, Outcome.TOO_MANY_SPANS, Outcome.TOO_MANY_FIELDS,
        Outcome.QUEUE_FULL, Outcome.SHUTTING_DOWN, Outcome.FAILURE, Outcome.MEMORY, Outcome.JOURNAL_FAILED,
    )),
    Case(http_calls, (
        Outcome.UNAUTHENTICATED, Outcome.TOO_LARGE, Outcome.UNSUPPORTED, Outcome.INCOMPLETE, Transport.HTTP,
    )),
    Case(a_full_journal, (Outcome.JOURNAL_FULL, Transport.GRPC)),
    Case(stalls, tuple(Stall)),
    Case(restores, tuple(Restored)),
    Case(questions, tuple(DiscoveryOutcome)),
    Case(scrapes, tuple(ScrapeOutcome)),
    Case(pulls, tuple(PullOutcome)),
    Case(preempted_between_two_pages, (RowDrop.PREEMPTION,)),
    Case(two_servers_at_one_address, (RowDrop.WHICH_SERVER,)),
)  # fmt: skip


def test_every_member_of_every_closed_set_has_a_case():
    named = {(type(member), member) for case in CASES for member in case.members}
    assert named == {(closed, member) for closed in closed_sets() for member in closed}


def closed_sets() -> set[type[enum.Enum]]:
    """Those by which the table counts."""
    labels = {value for metric in (*table.TABLE, *table.FLEET_TABLE) for _, values in metric.labels for value in values}
    return {type(value) for value in labels if isinstance(value, enum.Enum)}


def test_every_reason_on_the_page_of_reasons_is_counted():
    enums = {each for each in vars(reasons).values() if isinstance(each, type) and issubclass(each, enum.Enum)}
    assert {each for each in enums if each.__module__ == reasons.__name__} <= closed_sets()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.run.__name__)
def test_a_case_reaches_what_it_names(case, request):
    fixtures = [name for name in ("tmp_path", "monkeypatch") if name in inspect.signature(case.run).parameters]
    reached = {(type(member), member) for member in case.run(*(request.getfixturevalue(name) for name in fixtures))}
    assert {(type(member), member) for member in case.members} - reached == set()
