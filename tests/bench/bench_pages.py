"""Every number of learning from /metrics pages, beside its target: ``make bench WHAT=pages``.

Pages are a real server's (m1_pages, whose steps were recorded beside them) and those of other recordings made from
their steps. Learned on the first 60 % of the time, scored on every busy step of the rest. ``complete``: the same fit on
complete step telemetry. A real server's pages are judged as they were recorded, from the first one on. In made pages
it is chance where the first scrape falls: errors are the mean over five such clocks. Beside both stands the range.

A recording's name is its section. ``p1_engine_stats`` has no pages: it is learned from request spans alone. ``slower``
plays c10_long, on which the rule was chosen, and two others as a server that becomes slower. Steps of m1_pages and
p1_engine_stats come by ``--captures``.
"""

from __future__ import annotations

import gzip
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.config import Config
from collector.decode import Export
from collector.decode.pages import ScrapedPage, read_page_line
from collector.evaluate.captures import load
from collector.evaluate.systems import Fit, ape, design
from collector.join.pages import PageEngine
from collector.recordings import Recording
from collector.service import make_pipeline
from online import RowBlock, Target
from online.features import build
from online.rls import RlsLearner
from tests.bench.board import Board, run
from tests.support.banks import PORTABLE
from tests.support.paths import DATA
from tests.support.recordings import messages
from tests.support.slower import (
    decode_longer,
    every_step_longer,
    everything_longer,
    pages_of_a_slower_server,
    prefill_longer,
)
from tests.support.step_pages import pages_of, requests_of

FEATURES = build("portable", Target.STEP_TIME, {})
LEARN = 0.6
CLOCKS = 5
REQUEST_SPAN = "llm_request"
INTERVALS = {
    "m1_pages": {0.5: 1.1, 1.0: 1.25, 15.0: 1.6},
    "c5_offload": {0.5: 1.1, 1.0: 1.25},
    "c6_saturated": {0.5: 1.1, 1.0: 1.25},
    "c7_async_sim": {0.25: 2.0},
    "c10_long": {0.5: 1.1, 1.0: 1.25, 15.0: 1.6},
}


@dataclass
class Case:
    """One recording: all its steps, those scored, and the error of complete telemetry."""

    otlp: Path
    steps: RowBlock
    scored: RowBlock
    cut_ns: int
    complete: Fit


def case_of(board: Board, name: str) -> Case | None:
    """A recording; None where it is not there, which is said."""
    otlp = board.captures / name / "otlp.pb.gz"
    if not otlp.exists():
        board.line(name, "SKIPPED", note="needs its steps, by --captures")
        return None
    (capture,) = load(otlp, list(Recording(otlp, print)), Config(), 1.0)
    rows = capture.rows[Target.STEP_TIME]
    rows = rows.take(np.isfinite(FEATURES.evaluate(rows)).all(axis=1))
    cut_ns = int(rows.end_ns[0] + LEARN * (rows.end_ns[-1] - rows.end_ns[0]))
    late = (rows.end_ns > cut_ns) & (rows.steps == 1)
    return Case(otlp, rows, rows.take(late), cut_ns, fit(rows.take(rows.end_ns <= cut_ns)))


def fit(rows: RowBlock | None) -> Fit | None:
    """One fit of all rows; None of hardly any."""
    if rows is None or len(rows) < 3:
        return None
    learner = RlsLearner(FEATURES)
    learner.learn(design(FEATURES, rows)[0])
    return Fit.of(learner)


def errors(made: Fit, rows: RowBlock) -> tuple[float, float, float]:
    """Median and mean absolute error, bias; per cent."""
    predicted = made.predict(rows)
    error = 100 * ape(predicted, rows.elapsed_us)
    return float(np.median(error)), float(error.mean()), 100 * float(predicted.sum() / rows.elapsed_us.sum() - 1)


def said_of(made: Fit, rows: RowBlock) -> str:
    median, mean, bias = errors(made, rows)
    beta = " ".join(f"{value:.4g}" for value in made.beta)
    return f"mean {mean:.1f}, median {median:.1f}, bias {bias:+.1f}, {beta}"


def page_rows(pages, until_ns: int, since_ns: int = 0) -> RowBlock | None:
    engine = PageEngine("bench", "", 0, Config())
    for page in pages:
        if since_ns <= page.unix_ns <= until_ns:
            engine.add(page.unix_ns, page.mono_ns, page.engines[0])
    found = engine.advance()
    return found[0][1] if found else None


def clocks(case: Case, every_s: float, name: str) -> list[list]:
    """The pages of scrapes so far apart, by where the first one falls."""
    if name == "m1_pages":
        stride = max(1, round(every_s / 0.5))
        with gzip.open(DATA / name / "pages.jsonl.gz") as file:
            pages = [read_page_line(text, "m1") for text in file]
    else:
        pages, stride = pages_of(requests_of(case.otlp), case.steps, every_s / CLOCKS), CLOCKS
    return [pages[start::stride] for start in range(0, stride, max(1, stride // CLOCKS))]


def steps(name: str, board: Board) -> None:
    """Errors of what pages tell, in those of complete telemetry, and how soon they are as good."""
    if (case := case_of(board, name)) is None:
        return
    mean = errors(case.complete, case.scored)[1]
    board.line(f"{name} complete: mean error %", f"{mean:.1f}", note=said_of(case.complete, case.scored))
    for every_s, limit in INTERVALS[name].items():
        rows = [page_rows(pages, case.cut_ns) for pages in clocks(case, every_s, name)]
        made = [fit(each) for each in rows]
        ratios = [errors(each, case.scored)[1] / mean for each in made]
        ratio = ratios[0] if name == "m1_pages" else float(np.mean(ratios))
        note = f"{min(ratios):.2f} to {max(ratios):.2f}, mean {np.mean(ratios):.2f}; first: {len(rows[0])} rows, "
        note += said_of(made[0], case.scored)
        board.at_most(f"{name} every {every_s:g} s: mean error / complete", ratio, limit, note=note)
    if name in ("m1_pages", "c10_long"):
        minutes(board, name, case)


def minutes(board: Board, name: str, case: Case) -> None:
    """How long it takes."""
    pages = clocks(case, 1.0, name)[0]
    goal, begin_ns = 1.25 * errors(case.complete, case.scored)[0], pages[0].unix_ns
    told = f"{name} minutes to 1.25 x complete, 9 of 10 starts"
    for length_min in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        last_ns = case.cut_ns - int(length_min * 60e9)
        if last_ns <= begin_ns:
            break
        starts_ns = np.linspace(begin_ns, last_ns, 10).astype(np.int64)
        made = [fit(page_rows(pages, start_ns + int(length_min * 60e9), start_ns)) for start_ns in starts_ns]
        if sum(each is not None and errors(each, case.scored)[0] <= goal for each in made) >= 9:
            board.line(told, f"{length_min:g}", "<= 1.5", length_min <= 1.5)
            return
    board.line(told, "never", "<= 1.5", good=False)


def request_spans(board: Board) -> None:
    """Learned from nothing but the request spans of an un-forked server, beside complete telemetry."""
    name = "p1_engine_stats"
    if (case := case_of(board, name)) is None:
        return
    pipeline, requests = make_pipeline(PORTABLE), 0
    for payload in messages(case.otlp):
        export = ExportTraceServiceRequest.FromString(payload)
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                kept = [s for s in scope.spans if s.name == REQUEST_SPAN and s.end_time_unix_nano <= case.cut_ns]
                requests += len(kept)
                del scope.spans[:]
                scope.spans.extend(kept)
        pipeline.process([Export(export.SerializeToString(), name, 1, name)])
    pipeline.flush()
    (config,) = pipeline.snapshot(0, 1).configs
    features = config.targets[Target.STEP_TIME.value].models["portable"].features
    made = Fit("", FEATURES, np.array([feature.coefficient for feature in features]))
    mean, complete = (errors(each, case.scored)[1] for each in (made, case.complete))
    statuses = " ".join(f"{feature.name} {feature.status}" for feature in features)
    note = f"{mean:.1f} and {complete:.1f} %, {requests} requests, {statuses}"
    board.line(f"{name}, request spans alone: mean error / complete", f"{mean / complete:.2f}", note=note)


def slower(board: Board) -> None:
    """Minutes from a change of a recorded machine until pages tell of it, and until they tell its term."""
    scenes = {
        "no change": everything_longer(1.0),
        "+ 30.8 ms on every step": every_step_longer(30_800.0),
        "everything x 1.42": everything_longer(1.42),
        "decode x 3.3": decode_longer(3.3),
        "prefill x 1.5": prefill_longer(1.5),
    }
    # nothing was chosen on the last two; what a prompt token costs is c10_long's
    played_as = [(every_s, 2, 10, "c10_long") for every_s in (1.0, 5.0, 15.0)]
    for every_s, *rounds in (*played_as, (15.0, 40, 40, "c1_mixed"), (15.0, 40, 40, "c6_saturated")):
        for name, longer in scenes.items():
            told = first_told(pages_of_a_slower_server(longer, every_s, *rounds))
            board.line(f"{rounds[-1]}: {name}, pages every {every_s:g} s", told)


def first_told(played: tuple[list[ScrapedPage], int]) -> str:
    """When pages of a server that is slower from a time on told so, and when which term."""
    (pages, onset_ns), pipeline, told = played, make_pipeline(PORTABLE), {}
    step = max(round(15e9 / (pages[1].unix_ns - pages[0].unix_ns)), 1)
    for number, page in enumerate(pages):
        pipeline.process(pages=[page])
        for config in pipeline.snapshot(page.unix_ns, 1).configs if number % step == 0 else ():
            drift = config.targets[Target.STEP_TIME.value].drift if config.targets else None
            if drift is not None and drift.count:
                told.setdefault(drift.term or "reported", (page.unix_ns - onset_ns) / 60e9)
    said = ", ".join(f"{what} {minutes:.1f} min" for what, minutes in told.items())
    return said or f"not reported within {(pages[-1].unix_ns - onset_ns) / 60e9:.0f} min"


SECTIONS = {name: partial(steps, name) for name in INTERVALS}
SECTIONS |= {"p1_engine_stats": request_spans, "slower": slower}

if __name__ == "__main__":
    sys.exit(run(__doc__, SECTIONS))
