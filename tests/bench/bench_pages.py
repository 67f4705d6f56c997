"""Every number of learning from /metrics pages, beside its target: ``make bench WHAT=pages``.

Pages are a real server's (m1_pages, whose steps were recorded beside them) and those of other recordings made from
their steps. Learned on the first 60 % of the time, scored on every busy step of the rest. ``complete``: the same fit on
complete step telemetry. A real server's pages are judged as they were recorded, from the first one on. In made pages
it is chance where the first scrape falls: errors are the mean over five such clocks. Beside both stands the range.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.config import Config
from collector.decode.pages import PageParser, read_page_line
from collector.evaluate.baselines import TRACEFIT, TimedReading, score_windows
from collector.evaluate.captures import load
from collector.evaluate.systems import Fit, design, predict
from collector.identity import Knowledge
from collector.ingest import Export
from collector.join.pages import PageEngine
from collector.recordings import Recording
from collector.service import make_pipeline
from online import RowBlock, Target
from online.features import build
from online.rls import RlsLearner
from tests.bench.board import Board
from tests.support.paths import DATA
from tests.support.slower import (
    decode_longer,
    every_step_longer,
    everything_longer,
    pages_of_a_slower_server,
    prefill_longer,
)
from tests.support.step_pages import pages_of, requests_of

ALL_ROWS = 1 << 30
"""One fit of all rows: what a half-life of minutes forgets is not the question."""
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


BOARD = Board()


@dataclass
class Case:
    """One recording: all its steps, those scored, and the error of complete telemetry."""

    name: str
    otlp: Path
    steps: RowBlock
    learned: RowBlock
    scored: RowBlock
    cut_ns: int
    complete: RlsLearner


def case_of(name, otlp):
    (capture,) = load([Recording(otlp, lambda _: None)], Knowledge(), Config(), LEARN)
    rows = capture.full[Target.STEP_TIME].rows
    rows = rows.take(np.isfinite(FEATURES.evaluate(rows)).all(axis=1))
    cut_ns = int(rows.end_ns[0] + LEARN * (rows.end_ns[-1] - rows.end_ns[0]))
    after = rows.take((rows.end_ns > cut_ns) & (rows.steps == 1))
    if capture.truth_us:
        full = capture.full[Target.STEP_TIME]
        truth = capture.truth_us
        end = dict(zip(full.rows.end_ns.tolist(), full.step_id.tolist(), strict=True))
        after.elapsed_us[:] = [
            truth.get(end[e], t) for e, t in zip(after.end_ns.tolist(), after.elapsed_us, strict=True)
        ]
    before = rows.take(rows.end_ns <= cut_ns)
    return Case(name, otlp, rows, before, after, cut_ns, fit(before))


def fit(rows):
    if rows is None or len(rows) < 3:
        return None
    learner = RlsLearner(FEATURES, start_rows=ALL_ROWS)
    learner.learn(design(FEATURES, rows))
    return learner


def errors(learner, rows):
    """Median and mean absolute error, bias; per cent."""
    predicted = predict(learner, FEATURES, rows)
    error = 100 * np.abs(predicted / rows.elapsed_us - 1)
    return float(np.median(error)), float(error.mean()), 100 * float(predicted.sum() / rows.elapsed_us.sum() - 1)


def page_rows(pages, until_ns=None, since_ns=0):
    engine = PageEngine("bench", "", 0)
    for page in pages:
        if since_ns <= page.unix_ns and (until_ns is None or page.unix_ns <= until_ns):
            engine.add(page.unix_ns, page.mono_ns, page.engines[0])
    found = engine.advance()
    return found[0].rows if found else None


def recorded(path):
    parser = PageParser()
    with gzip.open(path) as file:
        return [read_page_line(text, parser, "m1") for text in file]


def pages_every(case, every_s, path):
    return clocks(case, every_s, path)[0]


def clocks(case, every_s, path):
    """The pages of scrapes so far apart, by where the first one falls."""
    pages, stride = pages_of(requests_of(case.otlp), case.steps, every_s / CLOCKS), CLOCKS
    if case.name == "m1_pages":
        pages, stride = recorded(path), max(1, round(every_s / 0.5))
    return [pages[start::stride] for start in range(0, stride, max(1, stride // CLOCKS))]


# --- steps and coefficients -------------------------------------------------------------------------------------------


def steps(case, path):
    median, mean, bias = errors(case.complete, case.scored)
    BOARD.line(
        f"{case.name} complete: mean error %",
        f"{mean:.1f}",
        note=f"median {median:.1f}, bias {bias:+.1f}, {coefficients(case.complete)}",
    )
    for every_s, limit in INTERVALS[case.name].items():
        rows = [page_rows(pages, case.cut_ns) for pages in clocks(case, every_s, path)]
        learners = [fit(each) for each in rows]
        found = [errors(learner, case.scored) for learner in learners]
        ratios = [each[1] / mean for each in found]
        ratio = ratios[0] if case.name == "m1_pages" else float(np.mean(ratios))
        note = f"{min(ratios):.2f} to {max(ratios):.2f}, mean {np.mean(ratios):.2f}; first: mean {found[0][1]:.1f}, "
        note += f"median {found[0][0]:.1f}, bias {found[0][2]:+.1f}, {len(rows[0])} rows, {coefficients(learners[0])}"
        BOARD.line(
            f"{case.name} every {every_s:g} s: mean error / complete",
            f"{ratio:.2f}",
            f"<= {limit}",
            ratio <= limit,
            note,
        )


def coefficients(learner):
    return " ".join(f"{value:.4g}" for value in learner.fit.beta[: len(FEATURES)])


# --- request spans instead of pages -----------------------------------------------------------------------------------


def request_spans(path):
    """Learned from nothing but the request spans of an un-forked server, beside complete telemetry."""
    case = case_of("p1_engine_stats", path)
    pipeline, requests = make_pipeline(Config(learners=("rls",), feature_sets=("portable",))), 0
    for received in Recording(path, lambda _: None).exports():
        export = ExportTraceServiceRequest.FromString(received.payload)
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                kept = [s for s in scope.spans if s.name == REQUEST_SPAN and s.end_time_unix_nano <= case.cut_ns]
                requests += len(kept)
                del scope.spans[:]
                scope.spans.extend(kept)
        pipeline.process([Export(export.SerializeToString(), case.name, "file", 1, case.name)])
    pipeline.flush()
    (config,) = pipeline.snapshot(0, 1).configs
    features = config.targets[Target.STEP_TIME.value].models["portable"].features
    predicted = FEATURES.evaluate(case.scored) @ np.array([feature.coefficient for feature in features])
    mean = 100 * float(np.abs(predicted / case.scored.elapsed_us - 1).mean())
    complete = errors(case.complete, case.scored)[1]
    note = f"{mean:.1f} and {complete:.1f} %, {requests} requests, " + " ".join(
        f"{f.name} {f.status}" for f in features
    )
    BOARD.line(f"{case.name}, request spans alone: mean error / complete", f"{mean / complete:.2f}", note=note)


# --- windows of 15 s --------------------------------------------------------------------------------------------------


def itl_windows(case, path):
    """Mean inter-token latency of 15 s windows: learned every 1 s, features at 0.5 s; beside the neighbours' models."""
    learner = fit(page_rows(pages_every(case, 1.0, path), case.cut_ns))
    readings = [TimedReading(page.unix_ns, page.mono_ns, page.engines[0]) for page in pages_every(case, 0.5, path)]
    windows, scores = score_windows(readings, Fit("portable", FEATURES, learner), case.cut_ns)
    for score in scores:
        target = "<= 10" if score["model"] == TRACEFIT else ""
        good = score["mean"] <= 0.1 if target else None
        what = "ITL of 15 s windows, mean error %" if target else f"  {score['model']}"
        value = f"{100 * score['mean']:.1f}" if "mean" in score else "-"
        note = score.get("note") or f"median {100 * score['median']:.1f}, {windows} windows"
        BOARD.line(f"{case.name} {what}", value, target, good, note)


# --- how long it takes ------------------------------------------------------------------------------------------------


def minutes(case, path):
    pages = pages_every(case, 1.0, path)
    goal = 1.25 * errors(case.complete, case.scored)[0]
    begin_ns = pages[0].unix_ns
    name = f"{case.name} minutes to 1.25 x complete, 9 of 10 starts"
    for length_min in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        last_ns = case.cut_ns - int(length_min * 60e9)
        if last_ns <= begin_ns:
            break
        good = 0
        for start_ns in np.linspace(begin_ns, last_ns, 10).astype(np.int64):
            learner = fit(page_rows(pages, start_ns + int(length_min * 60e9), start_ns))
            good += learner is not None and errors(learner, case.scored)[0] <= goal
        if good >= 9:
            BOARD.line(name, f"{length_min:g}", "<= 1.5", length_min <= 1.5)
            return
    BOARD.line(name, "never", "<= 1.5", good=False)


# --- slower, and in which term ----------------------------------------------------------------------------------------


def slower(every_s):
    """Minutes from a change of the machine of c10_long until pages tell of it, and until they tell its term."""
    scenes = {
        "+ 30.8 ms on every step": every_step_longer(30_800.0),
        "everything x 1.42": everything_longer(1.42),
        "decode x 3.3": decode_longer(3.3),
        "prefill x 1.5": prefill_longer(1.5),
    }
    for name, longer in scenes.items():
        pages, onset_ns = pages_of_a_slower_server(longer, every_s, 2, usual=2)
        pipeline, told = make_pipeline(Config(learners=("rls",), feature_sets=("portable",))), {}
        for number, page in enumerate(pages):
            pipeline.process(pages=[page])
            if number % 8 == 0 or page is pages[-1]:
                for config in pipeline.snapshot(page.unix_ns, 1).configs:
                    drift = config.targets[Target.STEP_TIME.value].drift if config.targets else None
                    after_min = (page.unix_ns - onset_ns) / 60e9
                    if drift is not None and drift.count:
                        told.setdefault("reported", after_min)
                        told |= {"term": after_min, "as": drift.term} if drift.term != told.get("as", "") else {}
        said = ", ".join(f"{what} {value if what == 'as' else f'{value:.0f} min'}" for what, value in told.items())
        watched_min = (pages[-1].unix_ns - onset_ns) / 60e9
        BOARD.line(f"{name}, pages every {every_s:g} s", said or f"not reported within {watched_min:.0f} min")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--recordings", type=Path, default=DATA, help="a directory of recordings by name")
    arguments.add_argument("--only", default=",".join(INTERVALS))
    arguments.add_argument("--slower", action="store_true", help="only how soon pages tell that a server is slower")
    chosen = arguments.parse_args()
    if chosen.slower:
        for every_s in (1.0, 5.0, 15.0):
            slower(every_s)
        return 0
    pages = chosen.recordings / "m1_pages" / "pages.jsonl.gz"
    for name in chosen.only.split(","):
        otlp = chosen.recordings / name / "otlp.pb.gz"
        if not otlp.exists():
            BOARD.skip(name, f"its steps at {otlp} (--recordings)")
            continue
        case = case_of(name, otlp)
        steps(case, pages)
        if name in ("m1_pages", "c10_long"):
            itl_windows(case, pages)
            minutes(case, pages)
    unforked = chosen.recordings / "p1_engine_stats" / "otlp.pb.gz"
    if unforked.exists():
        request_spans(unforked)
    return BOARD.end()


if __name__ == "__main__":
    sys.exit(main())
