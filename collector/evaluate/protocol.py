"""The protocol: every system on every capture, then what transfers; results as one structure, nothing printed here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

import tracefit
from collector.identity import Fact
from online import REQUEST_FEATURES, Floats, Quality, RowBlock, Snapshot, Target

from .captures import Capture
from .fits import Fit, ape, fit, prequential, rows_to_goal
from .leave_out import Transfer, leave_one_out
from .page_windows import PageReport
from .paths import RequestPath, paths_of
from .published import ALPHAS, published_scores
from .request_baselines import RequestReport, judge_requests
from .scores import Score, inversions, mean_error, request_scores, score_of, step_scores

STEP = Target.STEP_TIME

Tell = Callable[[float, str], None]
"""Receives the share done and what is being done."""


class CaptureReport(msgspec.Struct, frozen=True, kw_only=True):
    """One capture: what it is, and every system on it."""

    name: str
    config_id: str
    telemetry: str
    facts: dict[str, Fact]
    cannot_derive: list[str]
    learned_rows: int
    scored_rows: int
    interval_rows: bool
    scored_requests: int
    uncovered_requests: int
    dropped_rows: dict[str, int]
    scores: list[Score]
    served: RequestReport | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is printed and written."""

    schema: str
    tracefit_version: str
    learn_until: float
    captures: list[CaptureReport]
    pages: list[PageReport]
    left_out: str
    transfers: dict[str, list[Transfer]]
    inversions: dict[str, int | None]


def evaluate(
    captures: Sequence[Capture],
    systems: Sequence[str],
    *,
    learn_until: float,
    left_out: str,
    version: str,
    tell: Tell,
    snapshot: Snapshot | None = None,
    pages: Sequence[PageReport] = (),
) -> Report:
    """Run the whole protocol; deterministic."""
    reports = []
    for number, capture in enumerate(captures):
        done = 0.8 * number / len(captures)
        reports.append(_capture(capture, systems, snapshot, functools.partial(tell, done)))
    transfers = leave_one_out(captures, left_out, functools.partial(tell, 0.8)) if len(captures) > 1 else {}
    return Report(
        schema="tracefit.evaluation/1",
        tracefit_version=version,
        learn_until=learn_until,
        captures=reports,
        pages=list(pages),
        left_out=left_out,
        transfers=transfers,
        inversions=_inversions(reports, systems),
    )


def _capture(
    capture: Capture, systems: Sequence[str], snapshot: Snapshot | None, tell: Callable[[str], None]
) -> CaptureReport:
    full = capture.full.get(STEP)
    nothing = RowBlock.empty(STEP.vocabulary)
    learned = capture.learned.get(STEP, nothing)
    scored, interval_rows = _single_steps(capture.scored(STEP))
    requests_only = bool(len(scored)) and bool((scored.quality == Quality.REQUESTS).all())
    requests = [request for request in capture.requests if request.delivered_ns > capture.cut_ns]
    rows = full.rows if full is not None else nothing
    paths = paths_of(rows, requests)
    alphas = _alphas(capture, paths.paths)
    scores: list[Score] = []
    for system in systems:
        tell(f"{capture.name}: {system}")
        made = fit(system, STEP, capture.facts, learned)
        if made is None or len(scored) == 0:
            continue
        found = _score(made, scored, rows, paths.paths, alphas, requests_only=requests_only)
        scores.append(
            msgspec.structs.replace(
                found,
                rows_to_goal=rows_to_goal(system, capture.facts, learned, scored),
                prequential_mape=prequential(system, capture.facts, rows),
                queue_wait_mdape=_alpha_error(system, Target.QUEUE_WAIT, capture),
                api_queueing_mdape=_alpha_error(system, Target.API_QUEUEING, capture),
            )
        )
    scores += published_scores(snapshot, capture, scored, rows, paths.paths, requests_only=requests_only)
    return CaptureReport(
        name=capture.name,
        config_id=capture.config_id,
        telemetry=capture.telemetry,
        facts=dict(sorted(capture.facts.items())),
        cannot_derive=list(capture.cannot_derive),
        learned_rows=len(learned),
        scored_rows=len(scored),
        interval_rows=interval_rows,
        scored_requests=len(paths.paths),
        uncovered_requests=paths.uncovered,
        dropped_rows=capture.dropped_rows,
        scores=scores,
        served=judge_requests(capture.served, client_view(capture), capture.cut_ns, capture.end_ns),
    )


def client_view(capture: Capture) -> tracefit.Config | None:
    """What was published at the cut, as a client reads it."""
    if capture.published is None:
        return None
    alone = Snapshot(generation=1, created_unix_nano=capture.cut_ns, tracefit_version="", configs=[capture.published])
    return tracefit.load(alone.to_json()).config()


def _single_steps(rows: RowBlock) -> tuple[RowBlock, bool]:
    """The rows that are one step each, if there are enough of them to say something; else all, which are intervals."""
    single = (rows.steps == 1) & (rows.quality <= Quality.STEPS)
    enough = int(np.count_nonzero(single)) >= max(20, len(rows) // 10)
    return (rows.take(single), False) if enough else (rows, True)


def _score(
    made: Fit,
    scored: RowBlock,
    rows: RowBlock,
    paths: Sequence[RequestPath],
    alphas: dict[str, Floats],
    *,
    requests_only: bool,
) -> Score:
    prediction = made.predict(scored)
    values = step_scores(made, prediction, scored)
    if requests_only:
        values["itl"] = mean_error(prediction, scored.elapsed_us)
    else:
        values |= request_scores(paths, made.predict(rows), alphas)
    return score_of(
        values,
        system=made.system,
        columns=made.columns,
        identifiable=made.identifiable,
        learned_rows=made.rows,
        scored_rows=int(np.count_nonzero(np.isfinite(prediction))),
        requests=len(paths),
    )


def _alphas(capture: Capture, paths: Sequence[RequestPath]) -> dict[str, Floats]:
    """What ``portable`` says of each request outside the steps; the same for all systems, which differ in the steps."""
    raw = np.full((len(paths), len(REQUEST_FEATURES)), np.nan)
    for i, path in enumerate(paths):
        raw[i, REQUEST_FEATURES.index("prompt_tokens")] = path.request.prompt_tokens
        raw[i, REQUEST_FEATURES.index("output_tokens")] = path.request.output_tokens
    rows = RowBlock.of_lines(raw, np.ones(len(paths)))
    out = {}
    for target in ALPHAS:
        learned = capture.learned.get(target)
        made = fit("portable", target, capture.facts, learned) if learned is not None and len(paths) else None
        if made is not None:
            out[target.value] = made.predict(rows)
    return out


def _alpha_error(system: str, target: Target, capture: Capture) -> float | None:
    """Median relative error of a system's own alpha on the scored part."""
    learned, rows = capture.learned.get(target), capture.scored(target)
    if learned is None:
        return None
    made = fit(system, target, capture.facts, learned)
    if made is None or len(rows) == 0:
        return None
    errors = ape(made.predict(rows), rows.elapsed_us)
    return float(np.median(errors)) if len(errors) else None


def _inversions(reports: Sequence[CaptureReport], systems: Sequence[str]) -> dict[str, int | None]:
    """Wrongly ranked pairs of workloads by their 99th percentile, per system, over captures that all have it."""
    out: dict[str, int | None] = {}
    for system in systems:
        rows = [s for r in reports for s in r.scores if s.system == system and s.p99 is not None]
        if len(rows) > 1:
            out[system] = inversions([r.p99_observed_us or 0.0 for r in rows], [r.p99 for r in rows])
    return out
