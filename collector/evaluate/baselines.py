"""What users have otherwise, beside tracefit: for single requests what routers learn, for pages what autoscalers fit.

Requests. All learn from those delivered before the cut and are judged on the last half of those after it:

    request              TTFT at what the request met on arrival, TPOT at the mean batch it met while it decoded
    request at arrival   both at what it met on arrival, which is what the baselines are told
    trees                gradient-boosted trees on ``ROUTER_FEATURES`` at arrival
    ridge                Bayesian ridge on the same, standardized

The client is asked with the mean output of the learned requests: nobody knows an answer's length before it ends. Both
baselines are scikit-learn's, with its default settings and a fixed seed; without it only the client is scored.

A request met, of the others at its arrival A_i, F first and E last token, N output tokens:

    running   #{j : F_j <= A_i < E_j}           waiting   #{j : A_j < A_i < F_j}
    tokens so far   sum over the running of N_j (A_i - F_j) / (E_j - F_j)
    KV usage        (their prompts + tokens so far) / capacity, 0 where nobody said the capacity

and while it decoded the mean of #{j : F_j <= t < E_j} over F_i <= t < E_i, itself included. Counted from the spans of
finished requests: those that never ended are missing in all columns alike.

Pages. The mean inter-token latency (ITL) of windows of 15 s, learned on the first part and scored frozen on the rest:

    tracefit      sum_r d_r (x_r beta) / sum_r d_r l_r      over rows of the window; d: mean decoding requests, l: steps
    line          ITL = A k + B, k: mean KV usage; ordinary least squares over windows of 0.15 <= k <= 0.85, if ten are

Both are told the window's load, as it is; the line does not know a step. A window in which fewer than ten
tokens followed another is left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import tracefit
from collector.decode.pages import EngineReading, Meaning, ScrapedPage
from collector.join.pages import PageEngine
from collector.recordings import merged, open_recordings
from online import STEP_FEATURES, Floats, Ints, Mask, RowBlock, Target

from .captures import Request
from .systems import Fit, Score, fit

# --- requests ---------------------------------------------------------------------------------------------------------

ROUTER_FEATURES = ("prompt tokens", "running", "waiting", "KV usage", "tokens so far")


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Many of them by column, in order of arrival; times in seconds."""

    arrived_s: Floats
    first_s: Floats
    last_s: Floats
    delivered_ns: Ints
    prompt_tokens: Floats
    output_tokens: Floats
    engine: Ints

    @property
    def ttft_us(self) -> Floats:
        """From arrival to first token."""
        return 1e6 * (self.first_s - self.arrived_s)

    @property
    def tpot_us(self) -> Floats:
        """Between tokens; of answers of a single token 0."""
        return 1e6 * (self.last_s - self.first_s) / np.maximum(self.output_tokens - 1.0, 1.0)

    def met_at_arrival(self, kv_tokens: float) -> Floats:
        """``ROUTER_FEATURES`` of each; what share of a prompt was in the prefix cache is in no span."""
        rate = self.output_tokens / np.maximum(self.last_s - self.first_s, 1e-9)
        met = []
        for at_s, prompt, engine in zip(self.arrived_s, self.prompt_tokens, self.engine, strict=True):
            runs = (self.first_s <= at_s) & (at_s < self.last_s) & (self.engine == engine)
            waits = (self.arrived_s < at_s) & (at_s < self.first_s) & (self.engine == engine)
            so_far = float(rate[runs] @ (at_s - self.first_s[runs]))
            usage = (self.prompt_tokens[runs].sum() + so_far) / kv_tokens if kv_tokens else 0.0
            met.append((prompt, runs.sum(), waits.sum(), usage, so_far))
        return np.array(met, float).reshape(-1, len(ROUTER_FEATURES))

    def met_while_decoding(self) -> Floats:
        """Mean number in the batch over each request's own time in it, at least itself."""
        met = []
        for first_s, last_s, engine in zip(self.first_s, self.last_s, self.engine, strict=True):
            beside_s = np.minimum(self.last_s, last_s) - np.maximum(self.first_s, first_s)
            beside_s = beside_s[(beside_s > 0.0) & (self.engine == engine)]
            met.append(beside_s.sum() / max(last_s - first_s, 1e-9))
        return np.maximum(met, 1.0)


def by_column(requests: Sequence[Request]) -> ServedRequests:
    """Their columns, on a clock that begins with the first arrival."""
    usable = [each for each in requests if each.begun_ns < each.first_token_ns <= each.finished_ns]
    usable.sort(key=lambda each: (each.begun_ns, each.delivered_ns))
    epoch_ns = usable[0].begun_ns if usable else 0
    stamps = [(each.begun_ns, each.first_token_ns, each.finished_ns) for each in usable]
    arrived_s, first_s, last_s = (np.array(stamps, np.int64).reshape(-1, 3) - epoch_ns).T / 1e9
    told = [(each.delivered_ns, each.engine, each.prompt_tokens, each.output_tokens) for each in usable]
    delivered_ns, engine, prompt, output = np.array(told, np.int64).reshape(-1, 4).T
    lengths = prompt.astype(float), output.astype(float)
    return ServedRequests(arrived_s, first_s, last_s, delivered_ns, *lengths, engine)


LEARNED_MIN = 100
JUDGED_MIN = 20
NOT_INSTALLED = "the baselines trees and ridge need scikit-learn: install tracefit's extra evaluate"
BASELINES = ("trees", "ridge")


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every model on the requests of one capture; ``note`` says why one is missing."""

    learned: int
    judged: int
    scores: list[Score]
    note: str = ""


class Times(NamedTuple):
    """Predicted times of each request, us."""

    ttft_us: Floats
    tpot_us: Floats


def judge_requests(
    requests: Sequence[Request], config: tracefit.Config | None, cut_ns: int, end_ns: int
) -> RequestReport | None:
    """Every model side by side; None where there are too few requests, or nothing was learned of steps."""
    served = by_column(requests)
    learned = served.delivered_ns <= cut_ns
    judged = served.delivered_ns > cut_ns + (end_ns - cut_ns) // 2
    several = served.output_tokens > 1
    learned, judged = learned & several, judged & several
    if config is None or learned.sum() < LEARNED_MIN or judged.sum() < JUDGED_MIN:
        return None
    met = served.met_at_arrival(float(config.limits.kv_tokens or 0))
    output = float(served.output_tokens[learned].mean())
    try:
        at_arrival = asked(config, served.prompt_tokens[judged], output, 1.0 + met[judged, 1] + met[judged, 2])
        decoding = asked(config, served.prompt_tokens[judged], output, served.met_while_decoding()[judged])
    except tracefit.TracefitError as error:
        return RequestReport(learned=int(learned.sum()), judged=int(judged.sum()), scores=[], note=str(error))
    times = {
        "request": Times(at_arrival.ttft_us, decoding.tpot_us),
        "request at arrival": at_arrival,
    }
    note = NOT_INSTALLED
    if importlib.util.find_spec("sklearn") is not None:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with scikit-learn

        note = ""
        with threadpool_limits(1):  # threads that wait for a core cost more than they bring
            for name in BASELINES:
                model = fitted(name, met[learned], served, learned)
                times[name] = Times(*(one.predict(met[judged]) for one in model))
    scores = [_request_score(name, each, served, judged) for name, each in times.items()]
    return RequestReport(learned=int(learned.sum()), judged=int(judged.sum()), scores=scores, note=note)


def asked(config: tracefit.Config, prompt_tokens: Floats, output: float, concurrency: Floats) -> Times:
    """What the client says of each."""
    said = [
        config.request(prompt_tokens=prompt, output_tokens=output, concurrency=met)
        for prompt, met in zip(prompt_tokens.tolist(), concurrency.tolist(), strict=True)
    ]
    return Times(np.array([each.ttft.us for each in said]), np.array([each.itl.us for each in said]))


def fitted(name: str, features: Floats, served: ServedRequests, learned: Mask) -> tuple[Any, Any]:
    """A baseline for TTFT and one for TPOT."""
    # an extra, and a second to import
    from sklearn import ensemble, linear_model, pipeline, preprocessing  # noqa: PLC0415

    def regressor() -> Any:
        if name == "trees":
            return ensemble.HistGradientBoostingRegressor(random_state=0)
        return pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.BayesianRidge())

    return regressor().fit(features, served.ttft_us[learned]), regressor().fit(features, served.tpot_us[learned])


def _request_score(model: str, times: Times, served: ServedRequests, judged: Mask) -> Score:
    """Relative errors."""
    score: Score = {"model": model}
    for name, predicted_us, observed_us in (
        ("ttft", times.ttft_us, served.ttft_us[judged]),
        ("tpot", times.tpot_us, served.tpot_us[judged]),
    ):
        error = np.abs(predicted_us / observed_us - 1.0)
        score[f"{name}_median"], score[f"{name}_p90"] = np.quantile(error, (0.5, 0.9)).tolist()
    return score


# --- pages ------------------------------------------------------------------------------------------------------------

LINE_POINTS_MIN = 10
LINE_RANGE = (0.15, 0.85)
WINDOW_S = 15.0
_DECODED_MIN = 10
_DECODING = STEP_FEATURES.index("decode_requests")
TRACEFIT, LINE = "tracefit", "ITL = A k + B"


class TimedReading(NamedTuple):
    """One engine's counters at one time."""

    unix_ns: int
    mono_ns: int
    reading: EngineReading


class PageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's recorded pages: how well its mean inter-token latency is foretold."""

    name: str
    pages: int
    learned_rows: int
    windows: int
    scores: list[Score]


class _Window(NamedTuple):
    """Rows of one window, and its means."""

    rows: RowBlock
    itl_us: float
    kv_usage: float
    end_ns: int


def load_pages(paths: Sequence[Path]) -> dict[str, list[TimedReading]]:
    """Readings of each engine of one source's recordings, by name; empty if they are of something else."""
    readings: dict[str, list[TimedReading]] = {}
    path = paths[0]
    name = path.parent.name if path.name.startswith("pages.") else path.name.split(".")[0]
    for timed in merged(open_recordings(paths, lambda _: None)):  # what is wrong with them was said before
        if isinstance(timed.said, ScrapedPage):
            page = timed.said
            server = name if page.instance == page.recording else f"{name} {page.instance}"
            for reading in page.engines:
                key = server if reading.engine == "0" else f"{server}#{reading.engine}"
                readings.setdefault(key, []).append(TimedReading(page.unix_ns, page.mono_ns, reading))
    return readings


def _scraped(readings: Sequence[TimedReading], whole: PageEngine | None = None) -> PageEngine:
    """The engine after these readings; ``whole`` knows how many front ends it has."""
    engine = PageEngine("recording", "", 0)
    if whole is not None:
        engine.windows.take_front_ends_of(whole.windows)
    for timed in readings:
        engine.add(timed.unix_ns, timed.mono_ns, timed.reading)
    return engine


def _rows_of(engine: PageEngine) -> RowBlock | None:
    found = engine.advance()
    return found[0].rows if found else None


def evaluate_pages(name: str, readings: Sequence[TimedReading], learn_until: float) -> PageReport:
    """One engine's report."""
    begin_ns, end_ns = readings[0].unix_ns, readings[-1].unix_ns
    cut_ns = begin_ns + int(learn_until * (end_ns - begin_ns))
    rows = _rows_of(_scraped([timed for timed in readings if timed.unix_ns <= cut_ns]))
    learned = fit("portable", Target.STEP_TIME, {}, rows) if rows is not None else None
    windows, scores = score_windows(readings, learned, cut_ns)
    learned_rows = 0 if rows is None else len(rows)
    return PageReport(name=name, pages=len(readings), learned_rows=learned_rows, windows=windows, scores=scores)


def score_windows(readings: Sequence[TimedReading], learned: Fit | None, cut_ns: int) -> tuple[int, list[Score]]:
    """Scored windows, and each model's errors over them: ``learned`` as it is, the line from before the cut."""
    edges = np.arange(readings[0].unix_ns, readings[-1].unix_ns, int(WINDOW_S * 1e9))
    at_ns, whole = np.array([timed.unix_ns for timed in readings]), _scraped(readings)
    first, last = np.searchsorted(at_ns, edges[:-1]), np.searchsorted(at_ns, edges[1:], side="right")
    inside = (readings[begin:end] for begin, end in zip(first.tolist(), last.tolist(), strict=True))
    found = [_window(each, whole, int(end_ns)) for each, end_ns in zip(inside, edges[1:], strict=True)]
    windows = [window for window in found if window is not None]
    scored = [window for window in windows if window.end_ns > cut_ns]
    if not scored:
        return 0, []
    ours: Score = {"model": TRACEFIT, "note": "too few rows to begin"}
    if learned is not None:
        ours = _latency_score(TRACEFIT, [_predicted(learned, window.rows) for window in scored], scored)
    return len(scored), [ours, _line_score(windows[: len(windows) - len(scored)], scored)]


def _window(inside: Sequence[TimedReading], whole: PageEngine, end_ns: int) -> _Window | None:
    rows = _rows_of(_scraped(inside, whole)) if len(inside) > 1 else None
    if rows is None:
        return None
    first, last = inside[0].reading.values, inside[-1].reading.values
    decoded = last[Meaning.ITL_COUNT] - first[Meaning.ITL_COUNT]
    if not decoded >= _DECODED_MIN:  # a page without latencies has NaN
        return None
    itl_us = 1e6 * (last[Meaning.ITL_SECONDS] - first[Meaning.ITL_SECONDS]) / decoded
    kv_usage = float(np.mean([timed.reading.values[Meaning.KV_USAGE_RATIO] for timed in inside]))
    return _Window(rows, itl_us, kv_usage, end_ns)


def _predicted(learned: Fit, rows: RowBlock) -> float:
    decoding = np.add.reduceat(rows.raw[:, _DECODING], rows.offsets[:-1]) / rows.steps
    predicted_us = learned.predict(rows)
    known = np.isfinite(predicted_us)
    weight = float((decoding * rows.steps)[known].sum())
    return float((predicted_us * decoding)[known].sum()) / weight if weight > 0.0 else float("nan")


def _line_score(learned: Sequence[_Window], scored: Sequence[_Window]) -> Score:
    """By its own rule where it has so many points, else by what there is."""
    k, itl_us = (np.array([getattr(window, name) for window in learned]) for name in ("kv_usage", "itl_us"))
    inside = (k >= LINE_RANGE[0]) & (k <= LINE_RANGE[1])
    usable = inside if np.count_nonzero(inside) >= LINE_POINTS_MIN else np.isfinite(k)
    if not usable.any() or not np.ptp(k[usable]) > 0.0:
        return {"model": LINE, "note": "no line through the windows learned from"}
    a, b = np.polyfit(k[usable], itl_us[usable], 1)
    return _latency_score(LINE, [a * window.kv_usage + b for window in scored], scored)


def _latency_score(model: str, predicted_us: Sequence[float], windows: Sequence[_Window]) -> Score:
    error = np.abs(np.array(predicted_us) / [window.itl_us for window in windows] - 1.0)
    error = error[np.isfinite(error)]
    if not len(error):
        return {"model": model, "note": "nothing is predicted"}
    return {"model": model, "mean": float(error.mean()), "median": float(np.median(error))}
