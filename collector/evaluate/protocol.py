"""The protocol: every system on every capture, then what transfers; results as one structure, nothing printed here.

A request's path from SCHEDULED to FINISHED are the rows of its engine whose middle lies between the two stamps. A row
of one step counts whole (its stamps are microseconds to milliseconds from its boundaries); a row of several steps,
which bridges a hole in the telemetry, counts by the share of its time inside. In both scheduling modes this is the
inclusive step range of the request (asynchronous: from the step before its first, which it waits for, if one ran). A
request is scored when the rows of its path cover 97 to 103 % of it: what ran through a dropped warm-up step or an
unknown hole is not, and is counted.

Scores are ratios, not per cent:

    step       mean, median and 90th percentile of |yhat - y| / y, Pearson r, bias = sum yhat / sum y - 1
    gpu_time   the same mean per request: predicted path against SCHEDULED -> FINISHED
    e2e        |mean predicted - mean observed| / mean observed of SCHEDULED -> FINISHED (stalls are not taken out)
    e2e_full   the same of ARRIVED -> DEPARTED, with the predicted alphas and the observed wait in the queue
    ttft       of ARRIVED -> FIRST_TOKEN, likewise; of SCHEDULED -> FIRST_TOKEN where nobody saw the arrival
    itl        of (FIRST_TOKEN -> FINISHED) / (output tokens - 1)
    p99        99th percentile of SCHEDULED -> FINISHED, predicted / observed - 1
    coverage   share of scored steps between yhat times the 10th and the 90th percentile published for their stratum

The coefficients of a published snapshot are scored as they are, nothing learned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

import tracefit
from collector.identity import Fact
from online import REQUEST_FEATURES, ConfigSnapshot, Floats, Ints, Quality, RowBlock, Snapshot, Target
from online.features import FeatureSet, build

from .baselines import PageReport, RequestReport, judge_requests
from .captures import Capture, ScoredRequest
from .systems import Fit, Transfer, ape, fit, leave_one_out, prequential, rows_to_goal

COVER_MIN, COVER_MAX = 0.97, 1.03


@dataclass(frozen=True, slots=True)
class RequestPath:
    """One request with the rows of its path, (k,) indices and shares, and how many of them precede the first token."""

    request: ScoredRequest
    rows: Ints
    share: Floats
    prefill: Floats


class Timeline:
    """Rows of one engine in time order."""

    def __init__(self, rows: RowBlock, engine: int) -> None:
        of_engine = np.flatnonzero(rows.engine == engine)
        self.index = of_engine[np.argsort(rows.end_ns[of_engine], kind="stable")]
        self.end = rows.end_ns[self.index].astype(np.float64)
        self.elapsed = rows.elapsed_us[self.index] * 1e3
        self.start = self.end - self.elapsed
        self.single = rows.steps[self.index] == 1
        self.middle = (self.start + self.end) / 2

    def between(self, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
        """Row numbers and the share of each inside the interval."""
        low = max(0, int(np.searchsorted(self.end, start_ns)) - 1)
        high = int(np.searchsorted(self.start, end_ns)) + 1
        here = slice(low, high)
        inside = ((self.middle[here] > start_ns) & (self.middle[here] <= end_ns)).astype(np.float64)
        overlap = np.minimum(self.end[here], end_ns) - np.maximum(self.start[here], start_ns)
        share = np.where(self.single[here], inside, np.clip(overlap / self.elapsed[here], 0.0, 1.0))
        used = np.flatnonzero(share > 0.0)
        return self.index[here][used], share[used]


def paths_of(rows: RowBlock, requests: Sequence[ScoredRequest]) -> tuple[list[RequestPath], int]:
    """The path of every request that its rows cover, and how many they do not cover."""
    lines: dict[int, Timeline] = {}
    paths, uncovered = [], 0
    for request in requests:
        line = lines.setdefault(request.engine, Timeline(rows, request.engine))
        index, share = line.between(request.scheduled_ns, request.finished_ns)
        covered = float((rows.elapsed_us[index] * share).sum()) * 1e3 / (request.finished_ns - request.scheduled_ns)
        if not COVER_MIN <= covered <= COVER_MAX:
            uncovered += 1
            continue
        first, part = line.between(request.scheduled_ns, request.first_token_ns)
        prefill = np.zeros(len(index))
        prefill[np.searchsorted(index, first)] = part
        paths.append(RequestPath(request, index, share, prefill))
    return paths, uncovered


def predicted(paths: Sequence[RequestPath], prediction_us: Floats) -> tuple[Floats, Floats]:
    """Sum of the predictions along each path and up to its first token, each (n,) us; NaN where one is not known."""
    whole = np.array([float(prediction_us[p.rows] @ p.share) for p in paths])
    prefill = np.array([float(prediction_us[p.rows] @ p.prefill) for p in paths])
    return whole, prefill


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


def step_scores(fit: Fit | _Published, prediction_us: Floats, rows: RowBlock) -> dict[str, float | None]:
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


STEP = Target.STEP_TIME
ALPHAS = (Target.API_QUEUEING, Target.POST_DECODE)


@dataclass(frozen=True, slots=True)
class _Published:
    """The coefficients of a snapshot as something that predicts."""

    system: str
    features: FeatureSet
    beta: Floats
    identifiable: int
    rows: int

    @property
    def columns(self) -> int:
        """Columns of the set."""
        return len(self.features)

    def predict(self, rows: RowBlock) -> Floats:
        """Microseconds per row, (n,); NaN where a column is not known."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.features.evaluate(rows) @ self.beta)

    def interval(self, _rows: RowBlock) -> None:
        """What is published is of more than the coefficients."""


def _published(config: ConfigSnapshot | None, capture: Capture) -> Iterator[_Published]:
    """The published models of a step's time."""
    target = None if config is None else config.targets.get(STEP.value)
    for name, model in {} if target is None else sorted(target.models.items()):
        features = build(name, STEP, capture.facts) if "/" not in name and model.features else None
        if features is not None:
            values = {each.name: each.coefficient for each in model.features}
            beta = np.array([values.get(column, 0.0) for column in features.names])
            identified = sum(each.status == "identified" for each in model.features)
            yield _Published(f"snapshot/{name}", features, beta, identified, model.rows)


def _config_in(snapshot: Snapshot | None, capture: Capture) -> ConfigSnapshot | None:
    if snapshot is None or not snapshot.configs:
        return None
    same = [config for config in snapshot.configs if config.config_id == capture.config_id]
    return same[0] if same else snapshot.configs[0] if len(snapshot.configs) == 1 else None


def _published_alphas(config: ConfigSnapshot | None, paths: Sequence[RequestPath]) -> dict[str, Floats]:
    out: dict[str, Floats] = {}
    columns = {
        "intercept": np.ones(len(paths)),
        "prompt_tokens": np.array([p.request.prompt_tokens for p in paths], float),
        "output_tokens": np.array([p.request.output_tokens for p in paths], float),
    }
    for target in ALPHAS:
        published = None if config is None else config.targets.get(target.value)
        model = None if published is None else published.models.get("portable")
        if model is not None:
            terms = [f.coefficient * columns[f.name] for f in model.features if f.name in columns]
            out[target.value] = np.asarray(sum(terms, np.zeros(len(paths))))
    return out


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
    paths, uncovered = paths_of(rows, requests)
    alphas = _alphas(capture, paths)
    scores: list[Score] = []
    for system in systems:
        tell(f"{capture.name}: {system}")
        made = fit(system, STEP, capture.facts, learned)
        if made is None or len(scored) == 0:
            continue
        found = _score(made, scored, rows, paths, alphas, requests_only=requests_only)
        scores.append(
            msgspec.structs.replace(
                found,
                rows_to_goal=rows_to_goal(system, capture.facts, learned, scored),
                prequential_mape=prequential(system, capture.facts, rows),
                queue_wait_mdape=_alpha_error(system, Target.QUEUE_WAIT, capture),
                api_queueing_mdape=_alpha_error(system, Target.API_QUEUEING, capture),
            )
        )
    config = _config_in(snapshot, capture)
    for published in _published(config, capture) if len(scored) else ():
        published_alphas = _published_alphas(config, paths)
        scores.append(_score(published, scored, rows, paths, published_alphas, requests_only=requests_only))
    return CaptureReport(
        name=capture.name,
        config_id=capture.config_id,
        telemetry=capture.telemetry,
        facts=dict(sorted(capture.facts.items())),
        cannot_derive=list(capture.cannot_derive),
        learned_rows=len(learned),
        scored_rows=len(scored),
        interval_rows=interval_rows,
        scored_requests=len(paths),
        uncovered_requests=uncovered,
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
    made: Fit | _Published,
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
