"""Scores of one system on one capture: steps, requests, intervals. All errors are ratios, not per cent.

step       mean, median and 90th percentile of |yhat - y| / y, Pearson r, bias = sum yhat / sum y - 1
gpu_time   the same mean per request: predicted path against SCHEDULED -> FINISHED
e2e        |mean predicted - mean observed| / mean observed of SCHEDULED -> FINISHED (stalls are not taken out)
e2e_full   the same of ARRIVED -> DEPARTED, with the predicted alphas and the observed wait in the queue
ttft       of ARRIVED -> FIRST_TOKEN, likewise; of SCHEDULED -> FIRST_TOKEN where nobody saw the arrival
itl        of (FIRST_TOKEN -> FINISHED) / (output tokens - 1)
p99        99th percentile of SCHEDULED -> FINISHED, predicted / observed - 1
coverage   share of scored steps between yhat times the 10th and the 90th percentile published for their stratum
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from online import Floats, RowBlock

from .fits import Fit, ape
from .paths import RequestPath, predicted


class Score(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system on one capture; None = cannot be said."""

    system: str
    columns: int
    identifiable: int
    learned_rows: int
    scored_rows: int
    step_mape: float | None = None
    step_median: float | None = None
    step_p90: float | None = None
    pearson_r: float | None = None
    bias: float | None = None
    gpu_time_mape: float | None = None
    e2e: float | None = None
    e2e_full: float | None = None
    ttft: float | None = None
    itl: float | None = None
    p99: float | None = None
    p99_observed_us: float | None = None
    coverage: float | None = None
    rows_to_goal: int | None = None
    prequential_mape: float | None = None
    queue_wait_mdape: float | None = None
    api_queueing_mdape: float | None = None
    requests: int = 0


def score_of(values: dict[str, float | None], *, system: str, **counts: int) -> Score:
    """A score of named values; what is not among them cannot be said."""
    return msgspec.convert({"system": system, **counts, **values}, Score)


def mean_error(predicted_us: Floats, observed_us: Floats) -> float | None:
    """|mean predicted - mean observed| / mean observed; None without anything."""
    known = np.isfinite(predicted_us)
    if not known.any():
        return None
    observed = float(observed_us[known].mean())
    return abs(float(predicted_us[known].mean()) - observed) / observed


def step_scores(fit: Fit, prediction_us: Floats, rows: RowBlock) -> dict[str, float | None]:
    """Score the predicted step times, step by step: a diagnostic beside the scores per request."""
    known = np.isfinite(prediction_us)
    y, f = rows.elapsed_us[known], prediction_us[known]
    if len(y) == 0:
        return {}
    errors = ape(f, y)
    varied = len(y) > 2 and f.std() > 0 and y.std() > 0  # noqa: PLR2004  a correlation of two points is 1
    bands = fit.interval(rows)
    coverage = None
    if bands is not None:
        low, high = bands[0][known], bands[1][known]
        coverage = float(np.mean((y >= low * f) & (y <= high * f)))
    return {
        "step_mape": float(errors.mean()),
        "step_median": float(np.median(errors)),
        "step_p90": float(np.quantile(errors, 0.9)),
        "pearson_r": float(np.corrcoef(y, f)[0, 1]) if varied else None,
        "bias": float(f.sum() / y.sum() - 1),
        "coverage": coverage,
    }


def request_scores(
    paths: Sequence[RequestPath], prediction_us: Floats, alphas: dict[str, Floats]
) -> dict[str, float | None]:
    """Scores per request; ``alphas`` holds predicted api_queueing and post_decode of each path's request, (n,) us."""
    if not paths:
        return {}
    whole, prefill = predicted(paths, prediction_us)
    requests = [path.request for path in paths]
    ran = np.array([(r.finished_ns - r.scheduled_ns) / 1e3 for r in requests])
    to_first = np.array([(r.first_token_ns - r.scheduled_ns) / 1e3 for r in requests])
    waited = np.array([(r.scheduled_ns - r.queued_ns) / 1e3 for r in requests])
    tokens = np.array([max(r.output_tokens - 1, 0) for r in requests], float)
    several = tokens > 0
    out: dict[str, float | None] = {
        "gpu_time_mape": _mean(ape(whole, ran)),
        "e2e": mean_error(whole, ran),
        "ttft": mean_error(prefill, to_first),
        "p99_observed_us": float(np.quantile(ran, 0.99)),
    }
    known = np.isfinite(whole)
    if known.any():
        out["p99"] = float(np.quantile(whole[known], 0.99) / np.quantile(ran[known], 0.99) - 1)
    if several.any():
        gap = (ran - to_first)[several] / tokens[several]
        out["itl"] = mean_error((whole - prefill)[several] / tokens[several], gap)
    seen = np.array([r.arrived_ns is not None and r.departed_ns is not None for r in requests])
    if seen.any() and "api_queueing" in alphas:
        api = alphas["api_queueing"]
        arrived = np.array([r.arrived_ns or 0 for r in requests], float)
        departed = np.array([r.departed_ns or 0 for r in requests], float)
        first = np.array([r.first_token_ns for r in requests], float)
        post = alphas.get("post_decode", np.zeros(len(requests)))
        out["e2e_full"] = mean_error((api + waited + whole + post)[seen], ((departed - arrived) / 1e3)[seen])
        out["ttft"] = mean_error((api + waited + prefill)[seen], ((first - arrived) / 1e3)[seen])
    return out


def _mean(errors: Floats) -> float | None:
    return float(errors.mean()) if len(errors) else None


def inversions(observed_us: Sequence[float], errors: Sequence[float | None]) -> int | None:
    """Pairs of workloads whose 99th percentiles are ranked the wrong way round; None if one is not known."""
    if any(error is None for error in errors):
        return None
    forecast = [o * (1 + (e or 0.0)) for o, e in zip(observed_us, errors, strict=True)]
    count = 0
    for i in range(len(forecast)):
        for j in range(i):
            count += (observed_us[i] - observed_us[j]) * (forecast[i] - forecast[j]) < 0
    return count
