"""The protocol: every system on every capture, then what transfers; results as one structure, nothing printed here.

What is predicted for a request is the sum over the rows of its engine between SCHEDULED and FINISHED, each by the share
of its time inside: a step begins and ends microseconds to milliseconds from the stamps of its requests. A request is
scored where rows cover 97 % of that time. What ran through a dropped warm-up step or an unknown hole is not, and is
counted.

Scores are ratios, not per cent:

    step       mean of |yhat - y| / y, Pearson r
    e2e        |mean predicted - mean observed| / mean observed of SCHEDULED -> FINISHED (stalls are not taken out)
    e2e_full   the same of ARRIVED -> DEPARTED, with the predicted alphas and the observed wait in the queue
    ttft       of ARRIVED -> FIRST_TOKEN, likewise; of SCHEDULED -> FIRST_TOKEN where nobody saw the arrival
    itl        of (FIRST_TOKEN -> FINISHED) / (output tokens - 1)
    p99        99th percentile of SCHEDULED -> FINISHED, predicted / observed - 1
    coverage   share of scored steps between yhat times the 10th and the 90th percentile published for their stratum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collector import __version__
from online import REQUEST_FEATURES, Floats, Mask, Quality, RowBlock, Target
from online.features import PORTABLE, missing

from .captures import Capture
from .systems import Document, Fit, Score, ape, fit, mean, plain_name
from .transfer import group, leave_one_out

COVER_MIN = 0.97
STEP = Target.STEP_TIME
ALPHAS = (Target.API_QUEUEING, Target.POST_DECODE)


def time_in_rows(rows: RowBlock, us: Floats, requests: NDArray[Any]) -> tuple[Floats, Floats]:
    """Microseconds of ``us``, one a row, from SCHEDULED of each request to FIRST_TOKEN and to FINISHED, (k,) each.

    A row counts by the share of its time inside; NaN where one of them has no number.
    """
    order, spans_ns = np.argsort(rows.end_ns, kind="stable"), 1e3 * rows.elapsed_us
    ends_ns, longest_ns = rows.end_ns[order], int(spans_ns.max(initial=0.0))

    def between(request: NDArray[Any], stop: str) -> float:
        here = order[slice(*np.searchsorted(ends_ns, (request["scheduled_ns"], request[stop] + longest_ns)).tolist())]
        here = here[rows.engine[here] == request["engine"]]
        starts_ns = np.maximum(rows.end_ns[here] - spans_ns[here], request["scheduled_ns"])
        inside_ns = np.minimum(rows.end_ns[here], request[stop]) - starts_ns
        own = here[inside_ns > 0.0]
        return float((us[own] * inside_ns[inside_ns > 0.0] / spans_ns[own]).sum())

    first, whole = (np.array([between(each, at) for each in requests]) for at in ("first_token_ns", "finished_ns"))
    return first, whole


def covered(rows: RowBlock, requests: NDArray[Any]) -> NDArray[Any]:
    """Mask of the requests whose time the rows cover."""
    ran_us = (requests["finished_ns"] - requests["scheduled_ns"]) / 1e3
    whole: Mask = time_in_rows(rows, rows.elapsed_us, requests)[1] >= COVER_MIN * ran_us
    return np.extract(whole & (ran_us > 0.0), requests)


def mean_error(predicted_us: Floats, observed_us: Floats) -> float | None:
    """|mean predicted - mean observed| / mean observed; None without anything."""
    known = np.isfinite(predicted_us)
    if not known.any():
        return None
    observed = float(observed_us[known].mean())
    return abs(float(predicted_us[known].mean()) - observed) / observed


def step_scores(fitted: Fit, prediction_us: Floats, rows: RowBlock) -> dict[str, float | None]:
    """Score the predicted step times, step by step: a diagnostic beside the scores per request."""
    known = np.isfinite(prediction_us)
    y, f = rows.elapsed_us[known], prediction_us[known]
    if len(y) == 0:
        return {}
    bands = fitted.bands(rows.take(known))
    varied = len(y) > 2 and f.std() > 0 and y.std() > 0  # noqa: PLR2004  a correlation of two points is 1
    return {
        "step_mape": mean(ape(f, y)),
        "pearson_r": float(np.corrcoef(y, f)[0, 1]) if varied else None,
        "coverage": None if bands is None else float(np.mean((y >= bands[0] * f) & (y <= bands[1] * f))),
    }


def request_scores(
    requests: NDArray[Any], prefill: Floats, total: Floats, alphas: Mapping[Target, Floats]
) -> dict[str, float | None]:
    """Scores of what is predicted for each request, (k,) us: to its first token, to its end, and its alphas."""
    if not len(requests):
        return {}

    def stamps(name: str) -> Floats:
        return np.where(requests[name] > 0, requests[name] / 1e3, np.nan)

    scheduled, first, finished = stamps("scheduled_ns"), stamps("first_token_ns"), stamps("finished_ns")
    ran, to_first = finished - scheduled, first - scheduled
    tokens = np.maximum(requests["output_tokens"] - 1.0, 0.0)
    several, known = tokens > 0, np.isfinite(total)
    out: dict[str, float | None] = {
        "e2e": mean_error(total, ran),
        "ttft": mean_error(prefill, to_first),
    }
    if known.any():
        out["p99"] = float(np.quantile(total[known], 0.99) / np.quantile(ran[known], 0.99) - 1)
    if several.any():
        gap = (ran - to_first)[several] / tokens[several]
        out["itl"] = mean_error((total - prefill)[several] / tokens[several], gap)
    arrived, departed = stamps("arrived_ns"), stamps("departed_ns")
    seen = np.isfinite(arrived) & np.isfinite(departed)
    if seen.any() and Target.API_QUEUEING in alphas:
        before = alphas[Target.API_QUEUEING] + scheduled - stamps("queued_ns")
        after = alphas.get(Target.POST_DECODE, 0.0)
        out["e2e_full"] = mean_error((before + total + after)[seen], (departed - arrived)[seen])
        out["ttft"] = mean_error((before + prefill)[seen], (first - arrived)[seen])
    return out


def evaluate(
    captures: Sequence[Capture],
    systems: Sequence[str],
    learn_until: float = 0.6,
    left_out: str = "",
) -> Document:
    """Run the whole protocol; deterministic.

    ``left_out``: models where there are several, else workloads, by default.
    """
    several = len({group(capture, "model") for capture in captures}) > 1
    left_out = left_out or ("model" if several else "workload")
    plain = dict.fromkeys(map(plain_name, systems))
    return {
        "schema": "tracefit.evaluation/1",
        "tracefit_version": __version__,
        "learn_until": learn_until,
        "captures": [_scores_of(capture, systems) for capture in captures],
        "left_out": left_out,
        "transfers": leave_one_out(captures, left_out, plain) if len(captures) > 1 else {},
    }


def _scores_of(capture: Capture, systems: Sequence[str]) -> Document:
    """What a capture is, and every system on it."""
    facts, learned, rows = capture.facts, capture.learned(STEP), capture.all_rows(STEP)
    scored = _single_steps(capture.scored(STEP))
    late = (capture.requests["finished_ns"] > capture.cut_ns) & (capture.requests["scheduled_ns"] > 0)
    requests = covered(rows, capture.requests[late])
    alphas = _alphas(requests, [fit(PORTABLE, target, facts, capture.learned(target)) for target in ALPHAS])
    scores: list[Score] = []
    for made in [fit(system, STEP, facts, learned) for system in systems] if len(scored) else ():
        if made is None:
            continue
        prediction = made.predict(scored)
        score = {"system": made.system, "columns": len(made.features), **step_scores(made, prediction, scored)}
        if (scored.quality == Quality.REQUESTS).all():
            score["itl"] = mean_error(prediction, scored.elapsed_us)
        else:
            score |= request_scores(requests, *time_in_rows(rows, made.predict(rows), requests), alphas)
        score["queue_wait_error"] = _alpha_error(made.system, Target.QUEUE_WAIT, capture)
        score["api_queueing_error"] = _alpha_error(made.system, Target.API_QUEUEING, capture)
        scores.append(score)
    return {
        "name": capture.name,
        "telemetry": capture.telemetry,
        "cannot_derive": missing(map(plain_name, systems), facts),
        "learned_rows": len(learned),
        "scored_rows": len(scored),
        "scored_requests": len(requests),
        "uncovered_requests": int(late.sum()) - len(requests),
        "scores": scores,
    }


def _single_steps(rows: RowBlock) -> RowBlock:
    """The rows that are one step each, if there are enough of them to say something; else all, which are intervals."""
    single = (rows.steps == 1) & (rows.quality <= Quality.STEPS)
    enough = int(np.count_nonzero(single)) >= max(20, len(rows) // 10)
    return rows.take(single) if enough else rows


def _alphas(requests: NDArray[Any], fits: Sequence[Fit | None]) -> dict[Target, Floats]:
    """What ``portable`` says of each request outside the steps; the same for all systems, which differ in the steps."""
    raw = np.full((len(requests), len(REQUEST_FEATURES)), np.nan)
    for name in ("prompt_tokens", "output_tokens"):
        raw[:, REQUEST_FEATURES.index(name)] = requests[name]
    rows = RowBlock.of_lines(raw, np.ones(len(requests)))
    return {made.features.target: made.predict(rows) for made in fits if made is not None and len(requests)}


def _alpha_error(system: str, target: Target, capture: Capture) -> float | None:
    """Median error of a system's own alpha on the scored part, relative to the mean there: many wait for nothing."""
    made, rows = fit(system, target, capture.facts, capture.learned(target)), capture.scored(target)
    if made is None or not rows.elapsed_us.any():
        return None
    off_us = np.abs(made.predict(rows) - rows.elapsed_us)
    off_us = off_us[np.isfinite(off_us)]
    return float(np.median(off_us) / np.mean(rows.elapsed_us)) if len(off_us) else None
