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
    confident, wrong   answers of those loops that are more than 15 % off, and whose band does not have the truth

With ``--others`` so many servers are drawn from all that the kernel times know (``tests/support/gpu_cases.py``), with
limits, traffic and loops of their own, and each confident wrong answer is named.

Steps and FPM know the engine alone, so their TTFT and E2E are held against the engine's; spans and pages know the API
server, and are held against what a client sees. Beside them: NVIDIA's own regression on the same steps (a step of N
decodes for ITL, a step of the prompt alone for TTFT), and a straight line ITL = a k + b of windows of five seconds.

    make bench WHAT=gpus                               the forty, some 4 minutes on two idle cores
    make bench WHAT=gpus ARGS='dense'                  or mixtures, a model, a GPU, or model/GPU
    make bench WHAT=gpus ARGS='llama8b/H100 --minutes 2 --sources steps,pages'
    make bench WHAT=gpus ARGS='--others 12 --seed 4'   servers drawn at random
    make bench WHAT=gpus ARGS='--record'               and write docs/figures.json, which docs/accuracy.md has
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tracefit
from collector.cli import main as tracefit_main
from tests.bench.figures import record
from tests.support.docs_tables import make_table
from tests.support.gpu_cases import Case, all_cases, others
from tests.support.gpu_kernels import NvidiaRegression, exact_step_times, fits, fpm_record, step_times
from tests.support.vllm_scheduler import BLOCK_SIZE, Engine, StepTimes, Traffic, Work
from tests.support.vllm_senders import fpm_lines, page_lines, span_exports, step_exports, write, write_lines

EXAM_SEED, LEARN_SEED = 1_000_003, 11
EXAM_SPREAD = 0.3
EXAM_S = 30.0
"""Of each closed loop, on a fast machine."""
PHASE_NS = 20_000_000_000
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
WRONG = 15.0
"""Per cent from which on a usable answer whose band does not have the truth is a confident wrong one."""
SLOWEST_US = 150_000.0
"""Of a step of 32 requests: nobody serves so, and its exam takes forever."""
NVIDIA, LINE = "NVIDIA's regression", "line ITL = a k + b"


# ------------------------------------------------------------------- truth


def learned_traffic(case: Case, times: StepTimes, minutes: float) -> Traffic:
    """Phases of 20 s: arrivals at random at a share of what the server can do, or a closed loop of thinking clients."""
    traffic = Traffic(LEARN_SEED + case.seed)
    rng = traffic.rng
    start, stop = 0, int(minutes * 60e9)
    while start < stop:
        prompt, output = rng.choice(case.mixes)
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
    traffic = Traffic(EXAM_SEED + case.seed + clients)
    end = int(seconds * 1e9)
    traffic.closed(0, end, clients, prompt, output, EXAM_SPREAD, 0.0)
    engine = served(case, times, traffic, seconds, EXAM_SEED)
    requests = [request for request in engine.requests if request.sent > end // 5 and request.made > 1]
    if len(requests) < clients:  # those that ended first are no fair sample
        return exam_truth(case, times, loop, 2.0 * seconds)

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
            "vllm.block_size": BLOCK_SIZE,
            "vllm.num_gpu_blocks": case.limits.kv_blocks,
            "vllm.async_scheduling": case.limits.asynchronous,
            "vllm.enable_prefix_caching": False,
            "vllm.dtype": "bfloat16",
        }
        if case.machine.experts:
            facts["vllm.num_experts"] = case.machine.experts
            facts["vllm.num_experts_per_tok"] = case.machine.experts_per_token
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
    memory = {"vllm.block_size": BLOCK_SIZE, "vllm.num_gpu_blocks": case.limits.kv_blocks}
    told = facts_of(case, plugin=False) | memory | {"vllm.async_scheduling": case.limits.asynchronous}
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
    wrong: list[str] = field(default_factory=list)
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
            for what in ASKED:
                estimate, true = getattr(said, what), getattr(seen, what)
                row.errors[what].append(100.0 * (estimate.us / true - 1.0))
                if not said.usable:
                    continue
                row.inside.append(estimate.low <= true <= estimate.high)
                if abs(row.errors[what][-1]) > WRONG and not row.inside[-1]:
                    loop = f"{truth.clients} x {truth.prompt:.0f}/{truth.output:.0f}"
                    answer = "{:.1f} ms ({:.1f} to {:.1f}), truth {:.1f}".format(*np.divide((*estimate, true), 1e3))
                    row.wrong.append(f"{case.name} {source}, {loop}: {what} {answer}, {row.errors[what][-1]:+.0f} %")
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


def examine(case: Case, minutes: float, sources: Sequence[str]) -> list[Row]:
    """One case: serve, learn from each source, ask."""
    times = step_times(case.machine, case.gpu)
    engine = served(case, times, learned_traffic(case, times, minutes), minutes * 60.0, LEARN_SEED)
    truths = [exam_truth(case, times, loop, EXAM_S * slower(times)) for loop in case.loops]
    with tempfile.TemporaryDirectory() as directory:
        files = ((source, sent(case, engine, source, Path(directory))) for source in sources)
        rows = [examined(case, engine, source, path, truths) for source, path in files]
    return [*rows, nvidia(case, engine, truths), straight_line(case, engine, truths)]


def slower(times: StepTimes) -> float:
    """How much longer an exam lasts than on a fast machine, so that enough requests end."""
    return max(times(Work(decodes=32, decode_context=32 * 800)) / 12_000.0, 0.5)


ERRORS = ("step", "ITL, worst", "TTFT, worst", "E2E, worst")
HEADER = ("models", "source", "servers", *ERRORS, "inside the band", "usable", "confident, wrong")


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
        inside = [100.0 * each for row in these for each in row.inside]
        asked = len(ASKED) * sum(len(row.case.loops) for row in these)
        figures[kind] = [*map(float, values), _mean(inside), 100.0 * len(inside) / asked]
        figures[f"{kind}: wrong, of"] = [sum(len(row.wrong) for row in these), len(inside)]
    return figures


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else -1.0


def show(title: str, figures: Mapping[str, Any]) -> None:
    print(f"{title}\n{make_table(HEADER, table_rows(figures))}", flush=True)


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
            wrong = "{} of {}".format(*figures[f"{kind}, {source}: wrong, of"])
            answers = (f"{usable:.0f} %", wrong) if targets else ("–", "–")
            yield kind, source, f"{servers:.0f}", told, *cells, band, *answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = {case: {case.kind, case.model, case.gpu, case.name} for case in all_cases()}
    parser.add_argument(
        "cases", nargs="*", choices=[[], *set().union(*words.values())], metavar="CASE", help="all without one"
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="of traffic to learn from")
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--others", type=int, default=0, metavar="N", help="so many servers drawn at random instead")
    parser.add_argument("--seed", type=int, default=4, help="of what is drawn")
    parser.add_argument("--record", action="store_true", help="write docs/figures.json, which docs/accuracy.md has")
    options = parser.parse_args()
    rows, began = [], time.perf_counter()
    cases = [case for case, known in words.items() if not options.cases or known & set(options.cases)]
    if options.others:
        cases = list(islice(filter(is_served, others(options.seed)), options.others))
    work = functools.partial(examine, minutes=options.minutes, sources=options.sources.split(","))
    with ProcessPoolExecutor(2) as processes:
        for case, found in zip(cases, processes.map(work, cases), strict=True):
            notes = [f"; {row.source}: {row.note}" for row in found if row.note]
            show(f"{case.name} {case.machine} {case.limits}{''.join(notes)}", figures_of(found))
            rows.extend(row for row in found if row.source in SOURCES or not options.others)
    figures = figures_of(rows)
    show(f"all {len(cases)}", figures)
    for wrong in (each for row in rows for each in row.wrong):
        print(f"confident, wrong: {wrong}")
    if options.record:
        record("gpus others" if options.others else "gpus", figures)
    print(f"{len(cases)} cases in {(time.perf_counter() - began) / 60.0:.1f} minutes; mean error in %, worst loop")
    return 0


def is_served(case: Case) -> bool:
    """Whether the package has times of a server, and it is none that takes forever; says why not."""
    reason = "" if fits(case.machine, case.gpu) else "its weights do not fit"
    try:
        times = exact_step_times(case.machine, case.gpu)
        times(Work(1000, 1))
        if times(Work(decodes=32, decode_context=32 * 800)) > SLOWEST_US:
            reason = "it takes forever"
    except (RuntimeError, ValueError) as error:  # the package has no table
        reason = str(error)[:120]
    if reason:
        print(f"skipped {case.name} TP {case.machine.tensor_parallel}: {reason}")
    return not reason


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
