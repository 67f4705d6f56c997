"""What learning costs, beside a plain receiver of the same run: ``make bench WHAT=cost``, whole or by section.

Every stream is what the plugin sends (``steps+``, exact decode context), so that both targets of a step learn from all
of it: a cost whose rows were not learned, or only after it was measured, is a miss, whatever the cost. Figures are CPU
per step of the server, all its threads, as the kernel accounts it; the servers of a section run in turn, twice, and a
ratio is that of their lesser costs. The plain receiver (``tests/bench/servers.py``) makes a dict of every event and
learns nothing. Recordings of vLLM cost more than the stream, which is steady: of those, see ``recordings``.

It ends with a table, and with 1 if a number misses its target. ``--record`` writes what was measured to
docs/figures.json, from which the tables of docs/performance.md and README.md are made.
"""

from __future__ import annotations

import contextlib
import gzip
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.internal.encoder import _VarintBytes as varint_bytes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from collector.config.schema import Config
from tests.bench.bench_ingest import Board, measure_sections
from tests.bench.cost_stages import PARSE, measure
from tests.bench.ingest_load import SERVER_CPU, Server, bare, bytecode, pinned, send, sidecar, snapshot
from tests.support.otlp_load import Stream
from tests.support.recordings import otlp_file

ROUNDS = 2
DEFAULT: dict[str, str] = {}
RLS = {"LEARNERS": "[rls]"}
BULK_PROFILE = ("--profile", "bulk")
BULK = {"FEATURE_SETS": "[portable]"}
LEARNED_MIN = 0.9
"""Of the rows sent: what is held back at the start of a process, and the last seconds that may still arrive."""
PAID_MIN = 0.8
"""Of the rows sent while it is measured, so many are learned meanwhile, older ones too: an export in five seconds may
come just before an end or just after it."""

WARMED_STEPS = 40_000
"""Of all engines before the window: what a start, River's import and young coefficients cost are other figures.

Blocks are full-grown after 16,384 rows of steps and 256 of requests; the last seconds may wait for others.
"""

STEADY = {"steps_per_sec": 1000, "workers": 5, "duration": 30, "requests": True, "settle_s": 3}
SPARSE = {
    "steps_per_sec": 100,
    "workers": 1,
    "duration": 30,
    "settle_s": 3,
    "requests": True,
    "arrivals_per_step": 0.05,
}
SPARSE_CALLS = {
    "an export a second": {"spans_per_rpc": 1},
    "four a second, as the plugin": {"spans_per_rpc": 1, "steps_per_span": 25, "pool_rpcs": 80},
    "one in five seconds, as an SDK": {"spans_per_rpc": 5},
}
"""What a call costs is most of what a step costs: how the load is cut into calls. The first is judged."""
FLAT_OUT = {"steps_per_sec": 0, "workers": 2, "duration": 6, "settle_s": 2}
SMALL_CALLS = {**FLAT_OUT, "steps_per_span": 64, "spans_per_rpc": 1, "pool_rpcs": 300}
REPLAYED_STEPS = 200_000
MANY_STEPS, MANY_CONFIGS_STEPS = 1_000_000, 200_000
"""Rows are learned some seconds of event time after they came: a window pays for as many as it is sent, of before."""
MANY_WARMED_STEPS = 1_600_000
"""Of 1,000 engines too, the first rows have had their turn then: 16 calls of each are 26 seconds of event time."""
MANY_LAP_S = 3.3
"""Two calls in the time that a round of two takes: the engines' clocks go on together, and no faster than ours."""
PROFILES: dict[str, tuple[str, ...]] = {"shipped default": (), "bulk": BULK_PROFILE}
RECORDINGS = ("c10_long", "c7_async_sim")
"""The largest of tests/data in which a step stands once: a server for eleven minutes, and an asynchronous scheduler."""
READINGS = 5
SILENT = "engines of which nothing comes"
"""So the log says that a configuration was copied: of a thousand engines, that costs as much as learning does."""
CALLS_AT_ONCE = 5
"""Of 1,000 engines too: those of a fleet do not export in step. All find a handler that waits, and none is refused."""
MANY_ENGINES = {
    "JOIN__ENGINES_MAX": "1024",
    "BANK__CONFIGS_MAX": "1024",
    "DEDUPE__EMITTERS_MAX": "1024",
    # a state a minute would fall into some windows and not into others
    "STATE__INTERVAL_S": "600",
    # what a thousand configurations hold is told in the last generation, and that takes longer than five seconds
    "SHUTDOWN__DRAIN_S": "120",
}


class Costs:
    """CPU per step of servers that ran in turn, and what they learned."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.millicores: dict[str, float] = {}
        self.learned: dict[str, dict[str, float]] = {}
        self.paid: dict[str, float] = {}
        self.rss_mb: dict[str, float] = {}

    def add(self, name: str, report: dict[str, Any], learned: dict[str, float] | None = None) -> None:
        """One run; the lesser cost stays, and the fewest rows."""
        cost = report["server"]
        if cost["us_per_step"] < self.us.get(name, float("inf")):
            self.us[name], self.millicores[name] = cost["us_per_step"], cost["millicores"]
        self.rss_mb[name] = max(cost["rss_max_mb"], self.rss_mb.get(name, 0.0))
        if learned is not None:
            before = self.learned.get(name, learned)
            self.learned[name] = {target: min(share, before.get(target, 0.0)) for target, share in learned.items()}
            rows = min(cost["learned_rows"].get(target, 0.0) for target in learned)
            self.paid[name] = min(rows / max(report["steps"], 1), self.paid.get(name, float("inf")))

    def judge_rows(self, board: Board, what: str, name: str) -> None:
        """Whether a cost was paid for learning, and while it was measured: what is left a stop learns, unmeasured."""
        for target, share in sorted(self.learned[name].items()):
            board.at_least(f"{what}: rows of {target} learned, of those sent", share, LEARNED_MIN)
        board.at_least(f"{what}: rows learned meanwhile, of those sent", self.paid[name], PAID_MIN)

    def judge(self, board: Board, what: str, name: str, limit: float | None) -> None:
        """The ratio to the reference beside its target, if it has one, and whether it was paid for learning."""
        ratio = self.us[name] / self.us["reference"]
        if limit is None:
            board.keep(f"{what}: ÷ plain receiver", ratio)
            board.note(f"{what}: ÷ plain receiver {ratio:.2f}")
        else:
            board.at_most(f"{what}: ÷ plain receiver", ratio, limit)
        board.keep(f"{what}: us/step", self.us[name])
        board.keep(f"{what}: millicores", self.millicores[name])
        board.keep("plain receiver: us/step", self.us["reference"])
        board.note(
            f"{self.us[name]:.1f} us/step, {self.millicores[name]:.0f} millicores, {self.rss_mb[name]:.0f} MB; "
            f"plain receiver {self.us['reference']:.1f} us/step"
        )
        self.judge_rows(board, what, name)


def run_in_turn(load: dict[str, Any], *profiles: tuple[str, tuple[str, ...], dict[str, str]]) -> Costs:
    """The reference and sidecars under one load, in turn."""
    costs = Costs()
    for _ in range(ROUNDS):
        with bare("reference") as server:
            costs.add("reference", send(server, **load, warm_steps=WARMED_STEPS // load["workers"]))
        for name, arguments, settings in profiles:
            with loaded(*arguments, **settings) as (server, directory):
                report = send(server, **load, warm_steps=WARMED_STEPS // load["workers"])
                server.stop()
                costs.add(name, report, learned_shares(directory, report["steps"] + report["warmed_steps"]))
    return costs


@contextlib.contextmanager
def loaded(*arguments: str, **settings: str) -> Iterator[tuple[Server, str]]:
    """A sidecar and its directory."""
    with tempfile.TemporaryDirectory() as directory, sidecar(*arguments, directory=directory, **settings) as server:
        yield server, directory


def learned_shares(directory: str, steps: int) -> dict[str, float]:
    """Rows the champion of each step target learned, per step sent."""
    rows = {"step_time": 0, "schedule_time": 0}
    for config in snapshot(directory)["configs"]:
        for target in rows:
            found = config["targets"].get(target)
            rows[target] += 0 if found is None else found["models"]["portable"]["rows"]
    return {target: count / max(steps, 1) for target, count in rows.items()}


# ------------------------------------------------------------------------------------------------- sections


def steady(board: Board) -> None:
    """Five engines of 200 steps a second, each a call of 1,000 steps every five seconds."""
    costs = run_in_turn(STEADY, ("default", (), DEFAULT), ("rls", (), RLS))
    costs.judge(board, "1,000 steps/s + requests, shipped default", "default", 0.8)
    costs.judge(board, "1,000 steps/s + requests, learners: [rls]", "rls", 0.6)


def stages(board: Board) -> None:
    """The same stream stage by stage, in one process without sockets."""
    for name, config in (("shipped default", Config()), ("learners: [rls]", Config(learners=("rls",)))):
        cost = measure(config)
        for stage, us in cost.items():
            board.keep(f"{name}: {stage}", us)
        parse = cost.pop(PARSE)
        told = ", ".join(f"{stage} {us:.1f}" for stage, us in cost.items())
        total = sum(cost.values())
        board.note(f"{name}: {told}; together {total:.1f} us/step, {total / parse:.2f} of {PARSE} ({parse:.1f})")


def sparse(board: Board) -> None:
    """One engine of 100 steps and five requests a second, an export a second."""
    how, *_ = SPARSE_CALLS
    costs = run_in_turn({**SPARSE, **SPARSE_CALLS[how]}, ("default", (), DEFAULT))
    costs.judge(board, f"100 steps/s + requests, {how}, shipped default", "default", 0.9)


def sparse_calls(board: Board) -> None:
    """The same in more calls and in fewer."""
    _, *others = SPARSE_CALLS
    for how in others:
        costs = run_in_turn({**SPARSE, **SPARSE_CALLS[how]}, ("default", (), DEFAULT))
        costs.judge(board, f"100 steps/s + requests, {how}, shipped default", "default", None)


def flat_out(board: Board) -> None:
    """As fast as it is taken, in large calls and small ones."""
    costs = run_in_turn(FLAT_OUT, ("bulk", BULK_PROFILE, BULK), ("default", (), DEFAULT))
    costs.judge(board, "flat out, 1,000 steps a call, bulk", "bulk", 0.24)
    costs.judge(board, "flat out, 1,000 steps a call, shipped default", "default", 0.5)
    small = run_in_turn(SMALL_CALLS, ("bulk", BULK_PROFILE, BULK))
    small.judge(board, "flat out, 64 steps a call, bulk", "bulk", 0.4)


def memory(board: Board) -> None:
    """Resident memory, idle for ten seconds and loaded, and what the start costs."""
    for name, settings, idle_mb, loaded_mb, start_s in (
        ("shipped default", DEFAULT, 135, 150, 1.2),
        ("learners: [rls]", RLS, 65, 85, 0.5),
    ):
        with loaded(**settings) as (server, directory):
            wait_until_ready(server)
            board.at_most(f"start to ready, {name}", server.cpu_s(), start_s, "s CPU")
            time.sleep(10)
            board.at_most(f"RSS idle, {name}", server.rss_mb(), idle_mb, "MB")
            report = send(server, **{**STEADY, "duration": 15})
            board.at_most(f"RSS loaded, {name}", report["server"]["rss_max_mb"], loaded_mb, "MB")
            server.stop()
            for target, share in learned_shares(directory, report["steps"] + report["warmed_steps"]).items():
                board.at_least(f"RSS loaded, {name}: rows of {target} learned, of those sent", share, LEARNED_MIN)


def wait_until_ready(server: Server) -> None:
    """Ask ``/readyz`` until it says so."""
    command = [sys.executable, "-c", f"import urllib.request as u; u.urlopen('http://127.0.0.1:{server.pages}/readyz')"]
    for _ in range(200):
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.02)
    raise RuntimeError("the sidecar did not get ready")


def replay(board: Board) -> None:
    """``tracefit replay`` of a recording of the same stream, from start to exit."""
    with tempfile.TemporaryDirectory() as directory:
        recording = Path(directory) / "recording.pb.gz"
        record(recording, REPLAYED_STEPS)
        bytecode()  # compiled by the first process that is measured, it would be part of what a replay costs
        for name, arguments, limit_s in (("shipped default", (), 5.0), ("bulk", BULK_PROFILE, None)):
            cpu_s = replay_cpu_s(recording, Path(directory) / "snapshot.json", *arguments)
            if limit_s is None:
                board.keep(f"replay of {REPLAYED_STEPS:,} steps, {name}", cpu_s)
                board.note(f"replay of {REPLAYED_STEPS:,} steps, {name}: {cpu_s:.2f} s CPU")
            else:
                board.at_most(f"replay of {REPLAYED_STEPS:,} steps, {name}", cpu_s, limit_s, "s CPU")
            for target, share in learned_shares(directory, REPLAYED_STEPS).items():
                board.at_least(f"replay, {name}: rows of {target} learned, of those recorded", share, LEARNED_MIN)


def replay_cpu_s(recording: Path, out: Path, *arguments: str, learns: bool = True) -> float:
    """CPU of one ``tracefit replay``, from its start to its exit."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["-m", "collector", "replay", recording, "--snapshot", out]
    process = pinned(SERVER_CPU, *command, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = process.communicate()
    if learns == bool(process.returncode):  # the snapshot that lies there is that of another
        raise RuntimeError(said)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def recordings(board: Board) -> None:
    """Replays of what vLLM sent, beside a reader that makes a dict of every event and nothing else."""
    bytecode()
    with tempfile.TemporaryDirectory() as directory:
        out, empty = Path(directory) / "snapshot.json", Path(directory) / "empty.pb.gz"
        nothing = ExportTraceServiceRequest(resource_spans=[ResourceSpans()]).SerializeToString()
        empty.write_bytes(gzip.compress(varint_bytes(len(nothing)) + nothing))
        starts_s = {
            name: min(replay_cpu_s(empty, out, *arguments, learns=False) for _ in range(READINGS))
            for name, arguments in PROFILES.items()
        }
        for recording in RECORDINGS:
            path = otlp_file(recording)
            reader_s = min(plain_reader_s(path) for _ in range(READINGS))
            board.keep(f"{recording}: plain reader, s CPU", reader_s)
            for name, arguments in PROFILES.items():
                cpu_s = min(replay_cpu_s(path, out, *arguments) for _ in range(READINGS)) - starts_s[name]
                board.keep(f"{recording}, {name}: s CPU", cpu_s)
                board.keep(f"{recording}, {name}: ÷ plain reader", cpu_s / reader_s)
                board.note(f"{recording}, {name}: {cpu_s:.2f} s CPU, {cpu_s / reader_s:.1f} of a plain reader")


def plain_reader_s(recording: Path) -> float:
    """CPU of the plain reader, without its start."""
    process = pinned(SERVER_CPU, "-m", "tests.bench.plain_reader", recording, stdout=subprocess.PIPE)
    told, _ = process.communicate()
    return float(told.split()[0])


def record(path: Path, steps: int) -> None:
    """A recording of so many steps, in the framing of captures."""
    stream, written, number = Stream(1, requests=True), 0, 0
    with gzip.open(path, "wb", compresslevel=1) as file:
        while written < steps:
            export = stream.export(number)
            file.write(varint_bytes(len(export.payload)) + export.payload)
            written, number = written + export.steps, number + 1


def engines(board: Board) -> None:
    """The same total of steps from 10 engines and from 1,000 of one model, in turn; then of 1,000 that name none."""
    costs, undone, silences = Costs(), 0, 0
    for count, model, steps in (
        *((10, "toy", MANY_STEPS), (1000, "toy", MANY_STEPS)) * ROUNDS,
        (1000, "", MANY_CONFIGS_STEPS),
    ):
        with loaded(**MANY_ENGINES) as (server, directory):
            load = {"steps_per_sec": 0, "workers": CALLS_AT_ONCE, "engines_each": count // CALLS_AT_ONCE}
            load |= {"max_rpcs": steps // 100 // count, "pool_rpcs": 2, "spans_per_rpc": 1, "model": model}
            load |= {"lap_s": MANY_LAP_S, "warm_steps": MANY_WARMED_STEPS // count}
            report = send(server, **load, duration=300, settle_s=3)
            silences += server.said().count(SILENT) if model else 0  # a copy of one engine of a thousand is little
            undone += report["dropped_steps"] + (not server.stop(wait_s=180))
            sent = report["steps"] + report["warmed_steps"]
            costs.add(f"{count} {model}", report, learned_shares(directory, sent))
    ten, thousand, own = (costs.us[name] for name in ("10 toy", "1000 toy", "1000 "))
    board.at_most(f"{MANY_STEPS:,} steps of 1,000 engines ÷ of 10", thousand / ten, 1.3)
    board.at_most("engines: silences, whose copies are no part of what a step costs", silences, 0)
    board.at_most("engines: steps refused for good, and stops that left something undone", undone, 0)
    board.note(f"{thousand:.1f} us/step of 1,000, {ten:.1f} of 10; of 1,000 configurations {own:.1f}")
    for name in costs.learned:
        costs.judge_rows(board, f"engines, {name}", name)


SECTIONS = {
    section.__name__: section
    for section in (recordings, steady, stages, sparse, sparse_calls, flat_out, memory, replay, engines)
}


def main() -> int:
    """Print every number beside its target."""
    board: Board = measure_sections("cost", SECTIONS, __doc__)
    board.print_table()
    return 1 if board.missed else 0


if __name__ == "__main__":
    sys.exit(main())
