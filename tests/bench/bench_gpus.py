"""What tracefit learns on GPUs and models that nobody told it of, beside the truth: ``make bench WHAT=gpus``.

A simulated vLLM (``tests/support/vllm_scheduler.py``) serves on kernel times that NVIDIA measured and ships. Five dense
models and five mixtures of experts, on four GPUs each, synchronous and asynchronous in turn, serve four minutes of
changing traffic: arrivals at random and closed loops. ``tracefit replay`` learns from what the server sends, one
source at a time. Then the client is asked for ITL, TTFT and E2E of seven closed loops that were not in the traffic,
and the same server serves them.

    step   mean error of one step's time, over the steps of the traffic, against the time without noise
    ITL, TTFT, E2E   mean error over the seven loops; ``worst`` is the worst of them
    inside   share of the answers whose 80 % band has the truth, of the loops that the client calls usable
    usable   how many of the seven it calls so

Steps and FPM know the engine alone, so their TTFT and E2E are held against the engine's; spans and pages know the API
server, and are held against what a client sees. Beside them: NVIDIA's own regression on the same steps (a step of N
decodes for ITL, a step of the prompt alone for TTFT), and a straight line ITL = a k + b of windows of five seconds.

    make bench WHAT=gpus                               everything, some 7 minutes on an idle machine
    make bench WHAT=gpus ARGS='dense'                  or mixtures, a model, a GPU, or model/GPU
    make bench WHAT=gpus ARGS='llama8b/H100 --minutes 2 --sources steps,pages'
    make bench WHAT=gpus ARGS='--record'               and write docs/figures.json, which docs/accuracy.md has
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tracefit
from collector.cli import main as tracefit_main
from tests.bench.figures import record
from tests.support.gpu_kernels import DENSE, GPUS, MIXTURES, Machine, NvidiaRegression, fpm_record, step_times
from tests.support.vllm_scheduler import Engine, Limits, StepTimes, Traffic, Work
from tests.support.vllm_senders import fpm_lines, page_lines, span_exports, step_exports, write, write_lines

LOOPS = (
    (1, 256, 128),
    (3, 1200, 150),
    (6, 2500, 80),
    (12, 200, 300),
    (24, 600, 250),
    (48, 500, 200),
    (96, 900, 120),
)
"""Clients, mean prompt and output tokens of the exam."""
EXAM_SEED, LEARN_SEED = 1_000_003, 11
EXAM_SPREAD = 0.3
PHASE_NS = 20_000_000_000
MIXES = ((350, 180), (2000, 100), (120, 450), (1000, 70), (500, 260))
"""Mean prompt and output tokens of the traffic."""
SHARES = (0.15, 0.35, 0.6, 0.9)
CLIENTS = (2, 6, 16, 40, 80)
ASKED = ("itl", "ttft", "e2e")
SOURCES = ("steps", "fpm", "spans", "pages")
OF_ENGINE = ("steps", "fpm")
"""Sources that know nothing of the API server."""
TARGETS = {
    ("dense", "steps"): (1.5, 4, 3),
    ("dense", "fpm"): (1.5, 4, 3),
    ("dense", "spans"): (3, 8, 4),
    ("dense", "pages"): (4, 10, 5),
    ("mixtures", "steps"): (3, 6, 4),
    ("mixtures", "fpm"): (3, 6, 4),
    ("mixtures", "spans"): (5, 10, 6),
    ("mixtures", "pages"): (6, 12, 8),
}
"""Mean error of the exam, in per cent: ITL, TTFT, E2E."""
INSIDE = (75, 95)
EXPERTS_PER_TOKEN = 8
"""Of each of the five mixtures, by its config.json."""
NVIDIA, LINE = "NVIDIA's regression", "line ITL = a k + b"


class Case(NamedTuple):
    """One server."""

    kind: str
    model: str
    gpu: str
    machine: Machine
    limits: Limits

    @property
    def name(self) -> str:
        return f"{self.model}/{self.gpu}"


def all_cases() -> list[Case]:
    """Every other one synchronous, so that each model and each GPU has both."""
    return [
        Case(kind, model, gpu, machine, Limits(asynchronous=bool((row + column) % 2)))
        for kind, machines in (("dense", DENSE), ("mixtures", MIXTURES))
        for row, (model, machine) in enumerate(machines.items())
        for column, gpu in enumerate(GPUS)
    ]


# ------------------------------------------------------------------- truth


def learned_traffic(times: StepTimes, minutes: float) -> Traffic:
    """Phases of 20 s: arrivals at random at a share of what the server can do, or a closed loop of thinking clients."""
    traffic = Traffic(LEARN_SEED)
    rng = traffic.rng
    start, stop = 0, int(minutes * 60e9)
    while start < stop:
        prompt, output = rng.choice(MIXES)
        until = min(start + PHASE_NS, stop)
        if rng.random() < 0.6:
            batch = Work(decodes=64, decode_context=64 * (prompt + output // 2))
            each_us = times(Work(prompt, 1)) + output * times(batch) / 64
            traffic.poisson(start, until, rng.choice(SHARES) * 1e6 / each_us, prompt, output)
        else:
            traffic.closed(start, until, rng.choice(CLIENTS), prompt, output, 0.4, rng.choice((0.0, 0.5, 2.0)))
        start = until
    return traffic


def served(case: Case, times: StepTimes, traffic: Traffic, seconds: float, seed: int) -> Engine:
    return Engine(times, traffic, case.limits, seed=seed).run(int(seconds * 1e9))


class Seen(NamedTuple):
    """Mean times of a closed loop, in microseconds."""

    itl: float
    ttft: float
    e2e: float


class Truth(NamedTuple):
    """A closed loop that was served: its requests' mean sizes, and their times at the engine and at the client."""

    clients: int
    prompt: float
    output: float
    engine: Seen
    client: Seen


def exam_truth(case: Case, times: StepTimes, loop: tuple[int, int, int], seconds: float) -> Truth:
    """What the engine sees of requests, and what their clients see; without the first fifth of the time.

    The client is asked for the mean sizes of just these requests, so that chance in their sizes is no error of it.
    """
    clients, prompt, output = loop
    traffic = Traffic(EXAM_SEED + clients)
    end = int(seconds * 1e9)
    traffic.closed(0, end, clients, prompt, output, EXAM_SPREAD, 0.0)
    engine = served(case, times, traffic, seconds, EXAM_SEED)
    requests = [request for request in engine.requests if request.sent > end // 5 and request.made > 1]
    if not requests:
        raise SystemExit(f"{case.name}: no request of {loop} ended in {seconds:g} s")

    def mean(of):
        return statistics.fmean(of(r) for r in requests)

    itl = mean(lambda r: (r.last - r.first) / (r.made - 1)) / 1e3
    return Truth(
        clients,
        mean(lambda r: r.prompt),
        mean(lambda r: r.made),
        Seen(itl, mean(lambda r: r.first - r.received) / 1e3, mean(lambda r: r.last - r.received) / 1e3),
        Seen(itl, mean(lambda r: r.first_seen - r.sent) / 1e3, mean(lambda r: r.last_seen - r.sent) / 1e3),
    )


# ------------------------------------------------------------------- what is learned


def facts_of(case: Case, *, plugin: bool) -> dict[str, object]:
    """The resource: what the plugin reads off vLLM, or what docs/telemetry.md tells users of plain spans to set."""
    facts: dict[str, object] = {
        "service.name": "vllm",
        "service.instance.id": case.name,
        "vllm.model": case.machine.model,
        "hw.gpu.name": case.gpu,
        "vllm.tensor_parallel_size": case.machine.tensor_parallel,
        "vllm.max_num_seqs": case.limits.max_num_seqs,
        "vllm.max_num_batched_tokens": case.limits.max_num_batched_tokens,
    }
    if plugin:
        facts |= {
            "vllm.version": "0.33.0",
            "vllm.block_size": 16,
            "vllm.num_gpu_blocks": case.limits.kv_blocks,
            "vllm.async_scheduling": case.limits.asynchronous,
            "vllm.enable_prefix_caching": False,
            "vllm.dtype": "bfloat16",
        }
        if case.machine.experts:
            facts["vllm.num_experts"] = case.machine.experts
            facts["vllm.num_experts_per_tok"] = EXPERTS_PER_TOKEN
    return facts


def sent(case: Case, engine: Engine, source: str, directory: Path) -> Path:
    """The file of one source."""
    if source == "steps":
        return write(directory / "steps.pb.gz", step_exports(engine, facts_of(case, plugin=True)))
    if source == "fpm":
        return write_lines(directory / "fpm.jsonl.gz", fpm_lines(engine))
    if source == "spans":
        return write(directory / "spans.pb.gz", span_exports(engine, facts_of(case, plugin=False)))
    return write_lines(directory / "pages.jsonl.gz", page_lines(engine, case.machine.model))


def rule(case: Case, source: str) -> dict[str, object]:
    """What docs/telemetry.md tells users to say of spans that nobody thins out, and of records without facts."""
    if source != "fpm":
        return {"rules": [{"facts": {"trace_sampling": 1}}]} if source == "spans" else {}
    told = facts_of(case, plugin=False) | {"vllm.async_scheduling": case.limits.asynchronous}
    names = {name: name.removeprefix("vllm.") for name in told if name.startswith("vllm.")} | {"hw.gpu.name": "gpu"}
    return {"rules": [{"facts": {key: told[name] for name, key in names.items()}}]}


def learned(path: Path, configuration: Mapping[str, object]) -> tracefit.Snapshot:
    """The snapshot of a replay with the settings that are shipped, and these."""
    snapshot, settings = path.with_name("snapshot.json"), path.with_name("tracefit.yaml")
    settings.write_text(json.dumps(configuration))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = tracefit_main(["replay", str(path), "--snapshot", str(snapshot), "--config", str(settings)])
    if code:
        raise SystemExit(f"replay of {path.name} failed:\n{said.getvalue()}")
    return tracefit.load(snapshot.read_bytes())


@dataclass
class Row:
    """One case and source: errors in per cent."""

    case: Case
    source: str
    step: float = math.nan
    errors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    inside: list[bool] = field(default_factory=list)
    usable: int = 0
    note: str = ""


def examined(case: Case, engine: Engine, source: str, path: Path, truths: list[Truth]) -> Row:
    """Ask the client what it has learned from this file."""
    row = Row(case, source)
    snapshot = learned(path, rule(case, source))
    try:
        config = snapshot.config()
        if source == "pages":  # a page does not tell them
            limits = case.limits
            config = config.assuming(
                max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
            )
        row.step = step_error(config, engine)
        for truth in truths:
            said = config.request(prompt_tokens=truth.prompt, output_tokens=truth.output, concurrency=truth.clients)
            seen = truth.engine if source in OF_ENGINE else truth.client
            row.usable += said.usable
            for what in ASKED:
                estimate, true = getattr(said, what), getattr(seen, what)
                row.errors[what].append(100.0 * (estimate.us / true - 1.0))
                if said.usable:
                    row.inside.append(estimate.low <= true <= estimate.high)
    except tracefit.TracefitError as error:
        row.note = f"{type(error).__name__}: {error}"
    return row


def step_error(config: tracefit.Config, engine: Engine) -> float:
    """Mean error of the times of the steps that were served, in per cent."""

    def error(us: float, work: Work) -> float:
        said = config.step_time(
            prefill_tokens=work.prefill_tokens,
            requests=work.prefill_requests + work.decodes,
            decode_context_tokens=work.decode_context + work.decodes,
        )
        return abs(said.us / us - 1.0)

    return 100.0 * statistics.fmean(
        error(each.mean_us, each.work) for each in engine.steps if each.done and each.mean_us
    )


# ------------------------------------------------------------------- beside it


def nvidia(case: Case, engine: Engine, truths: list[Truth]) -> Row:
    """NVIDIA's regression, tuned step by step; its error is of each step before it was told."""
    row, model, before = Row(case, NVIDIA), NvidiaRegression(), 0
    errors, told = [], []
    for step in engine.steps:
        if step.done and step.mean_us:
            wall_us = (step.done - max(before, step.start)) / 1e3
            if (said := model.us(step.work)) is not None:
                errors.append(abs(said / step.mean_us - 1.0))
            told.append(fpm_record(step.work, wall_us / 1e6))
            if len(told) == 16:
                model.learn(told)
                told.clear()
        before = step.done
    row.step = 100.0 * statistics.fmean(errors) if errors else math.nan
    for truth in truths:
        context = int(truth.clients * (truth.prompt + truth.output / 2))
        itl, ttft = model.us(Work(decodes=truth.clients, decode_context=context)), model.us(Work(int(truth.prompt), 1))
        if itl is not None:
            row.errors["itl"].append(100.0 * (itl / truth.engine.itl - 1.0))
        if ttft is not None:
            row.errors["ttft"].append(100.0 * (ttft / truth.engine.ttft - 1.0))
    return row


def straight_line(case: Case, engine: Engine, truths: list[Truth]) -> Row:
    """Mean ITL over mean batch of windows of five seconds."""
    windows: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for step in engine.steps:
        at = windows[step.done // 5_000_000_000]
        count = sum(step.gaps.values())
        at[0] += count
        at[1] += sum(gap * times for gap, times in step.gaps.items()) / 1e3
        at[2] += bool(count)
    k = [count / steps for count, _, steps in windows.values() if steps]
    itl = [us / count for count, us, steps in windows.values() if steps]
    slope, base = np.polyfit(k, itl, 1)
    row = Row(case, LINE)
    for truth in truths:
        row.errors["itl"].append(100.0 * ((base + slope * truth.clients) / truth.engine.itl - 1.0))
    return row


# ------------------------------------------------------------------- the run


def examine(case: Case, minutes: float, exam_seconds: float, sources: Sequence[str]) -> list[Row]:
    """One case: serve, learn from each source, ask."""
    times = step_times(case.machine, case.gpu)
    engine = served(case, times, learned_traffic(times, minutes), minutes * 60.0, LEARN_SEED)
    truths = [exam_truth(case, times, loop, exam_seconds * slower(times)) for loop in LOOPS]
    with tempfile.TemporaryDirectory() as directory:
        files = ((source, sent(case, engine, source, Path(directory))) for source in sources)
        rows = [examined(case, engine, source, path, truths) for source, path in files]
    return [*rows, nvidia(case, engine, truths), straight_line(case, engine, truths)]


def slower(times: StepTimes) -> float:
    """How much longer an exam lasts than on a fast machine, so that enough requests end."""
    return max(times(Work(decodes=32, decode_context=32 * 800)) / 12_000.0, 0.5)


HEADER = ("models", "source", "servers", "step", "ITL, worst", "TTFT, worst", "E2E, worst", "inside the band", "usable")


WIDTHS = (8, 19, 7, 5, 18, 17, 16, 15, 6)


def figures_of(rows: list[Row]) -> dict[str, object]:
    """Of each kind of model and source: how many servers, errors in per cent, shares; -1 for what is not known."""
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[f"{row.case.kind}, {row.source}"].append(row)
    figures: dict[str, object] = {}
    for kind, these in kinds.items():
        values = [float(len(these)), _mean([row.step for row in these])]
        for what in ASKED:
            errors = [np.abs(row.errors[what]) for row in these if row.errors[what]]
            values += [_mean([each.mean() for each in errors]), max((each.max() for each in errors), default=-1.0)]
        values.append(_mean([100.0 * each for row in these for each in row.inside]))
        figures[kind] = [*map(float, values), _mean([100.0 * row.usable / len(LOOPS) for row in these])]
    return figures


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else -1.0


def show(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    print(title, flush=True)
    for cells in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=True)))


def table_rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row for each kind of model and source, each figure beside its target; for the run and for the document."""
    for kind in ("dense", "mixtures"):
        for source in (*SOURCES, NVIDIA, LINE):
            if f"{kind}, {source}" not in figures:
                continue
            servers, step, *errors, inside, usable = figures[f"{kind}, {source}"]
            targets = TARGETS.get((kind, source))
            wanted = [f" (≤ {each:g})" for each in targets] if targets else [""] * len(ASKED)
            cells = [
                f"{mean:.1f}{target}, {worst:.0f}" if mean >= 0.0 else "–"
                for mean, worst, target in zip(errors[::2], errors[1::2], wanted, strict=True)
            ]
            band = f"{inside:.0f} % ({INSIDE[0]}–{INSIDE[1]})" if inside >= 0.0 else "–"
            told = f"{step:.1f}" if step >= 0.0 else "–"
            yield kind, source, f"{servers:.0f}", told, *cells, band, f"{usable:.0f} %" if targets else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = {case: {case.kind, case.model, case.gpu, case.name} for case in all_cases()}
    parser.add_argument(
        "cases", nargs="*", choices=[[], *set().union(*words.values())], metavar="CASE", help="all without one"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="of traffic to learn from")
    parser.add_argument("--exam-seconds", type=float, default=30.0, help="of each closed loop, on a fast machine")
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--record", action="store_true", help="write docs/figures.json, which docs/accuracy.md has")
    options = parser.parse_args()
    rows, began = [], time.perf_counter()
    cases = [case for case, known in words.items() if not options.cases or known & set(options.cases)]
    for case in cases:
        found = examine(case, options.minutes, options.exam_seconds, options.sources.split(","))
        notes = [f"; {row.source}: {row.note}" for row in found if row.note]
        show(
            f"{case.name} {'async' if case.limits.asynchronous else 'sync'}{''.join(notes)}",
            table_rows(figures_of(found)),
        )
        rows.extend(found)
    figures = figures_of(rows)
    show(f"all {len(cases)}", [HEADER, *table_rows(figures)])
    if options.record:
        record("gpus", figures)
    print(f"{len(cases)} cases in {(time.perf_counter() - began) / 60.0:.1f} minutes; mean error in %, worst loop")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
