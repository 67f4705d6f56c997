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
    line          ITL = A k + B, k: mean KV usage; ordinary least squares over at least ten points, 0.15 <= k <= 0.85

Both are told the window's load, as it is; the line does not know a step. A window in which fewer than ten
tokens followed another is left out.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

import tracefit
from collector.decode.pages import EngineReading, Meaning, ScrapedPage
from collector.join.pages import PageEngine
from collector.recordings import merged, open_recordings
from online import STEP_FEATURES, Floats, Ints, Mask, RowBlock, Target

from .captures import ServedRequest
from .systems import Fit, fit

# --- requests ---------------------------------------------------------------------------------------------------------

ROUTER_FEATURES = ("prompt tokens", "running", "waiting", "KV usage", "prefix share", "tokens so far")


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

    def __len__(self) -> int:
        return len(self.arrived_s)

    @property
    def ttft_us(self) -> Floats:
        """From arrival to first token."""
        return 1e6 * (self.first_s - self.arrived_s)

    @property
    def tpot_us(self) -> Floats:
        """Between tokens; of answers of a single token 0."""
        return 1e6 * (self.last_s - self.first_s) / np.maximum(self.output_tokens - 1.0, 1.0)

    def met_at_arrival(self, kv_tokens: float) -> Floats:
        """``ROUTER_FEATURES`` of each; the prefix share is in no span and stays 0."""
        return self._by_engine(lambda own: _met_at_arrival(own, kv_tokens))

    def met_while_decoding(self) -> Floats:
        """Mean number in the batch over each request's own time in it, at least itself."""
        return self._by_engine(_met_while_decoding)

    def _by_engine(self, met: Callable[[ServedRequests], Floats]) -> Floats:
        """What each met among the requests of its own engine."""
        out = met(self)
        for engine in np.unique(self.engine).tolist() if len(self) and np.ptp(self.engine) else ():
            own = self.engine == engine
            out[own] = met(ServedRequests(*(getattr(self, column.name)[own] for column in fields(self))))
        return out


def by_column(requests: Sequence[ServedRequest]) -> ServedRequests:
    """Their columns, on a clock that begins with the first arrival."""
    usable = [each for each in requests if each.arrived_ns < each.first_token_ns <= each.last_token_ns]
    usable.sort(key=lambda each: (each.arrived_ns, each.delivered_ns))
    stamps = [(each.arrived_ns, each.first_token_ns, each.last_token_ns, each.delivered_ns) for each in usable]
    columns = np.array(stamps, np.int64).reshape(-1, 4)
    epoch_ns = columns[0, 0] if len(columns) else 0
    seconds = (columns[:, :3] - epoch_ns) / 1e9
    return ServedRequests(
        seconds[:, 0],
        seconds[:, 1],
        seconds[:, 2],
        columns[:, 3],
        np.array([each.prompt_tokens for each in usable], float),
        np.array([each.output_tokens for each in usable], float),
        np.array([each.engine for each in usable], np.int64),
    )


def _met_at_arrival(served: ServedRequests, kv_tokens: float) -> Floats:
    starts, ends = np.sort(served.first_s), np.sort(served.last_s)
    running = np.searchsorted(starts, served.arrived_s, "right") - np.searchsorted(ends, served.arrived_s, "right")
    before = np.searchsorted(served.arrived_s, served.arrived_s, "left")
    waiting = before - np.searchsorted(starts, served.arrived_s, "right")
    held, so_far = _held_at(served, served.arrived_s)
    usage = (held + so_far) / kv_tokens if kv_tokens else np.zeros(len(served))
    known = (served.prompt_tokens, running, np.maximum(waiting, 0), usage, np.zeros(len(served)), so_far)
    return np.stack(known, axis=1).astype(float)


def _met_while_decoding(served: ServedRequests) -> Floats:
    at = np.concatenate((served.first_s, served.last_s))
    order = np.argsort(at, kind="stable")
    at, step = at[order], np.repeat((1.0, -1.0), len(served))[order]
    number = np.cumsum(step)
    area = np.concatenate(([0.0], np.cumsum(number[:-1] * np.diff(at))))

    def until(time_s: Floats) -> Floats:
        index = np.clip(np.searchsorted(at, time_s, "right") - 1, 0, len(at) - 1)
        return area[index] + number[index] * (time_s - at[index])

    span_s = np.maximum(served.last_s - served.first_s, 1e-9)
    return np.maximum((until(served.last_s) - until(served.first_s)) / span_s, 1.0)


def _held_at(served: ServedRequests, times_s: Floats) -> tuple[Floats, Floats]:
    """Prompt tokens, and tokens made so far, of those that run at each time."""
    rate = served.output_tokens / np.maximum(served.last_s - served.first_s, 1e-9)

    def summed(values: Floats) -> Floats:
        begun, over = np.argsort(served.first_s, kind="stable"), np.argsort(served.last_s, kind="stable")
        in_all = np.concatenate(([0.0], np.cumsum(values[begun])))
        left = np.concatenate(([0.0], np.cumsum(values[over])))
        index = np.searchsorted(served.first_s[begun], times_s, "right")
        return in_all[index] - left[np.searchsorted(served.last_s[over], times_s, "right")]

    so_far = times_s * summed(rate) - summed(rate * served.first_s)
    return np.maximum(summed(served.prompt_tokens), 0.0), np.maximum(so_far, 0.0)


LEARNED_MIN = 100
JUDGED_MIN = 20
NOT_INSTALLED = "the baselines trees and ridge need scikit-learn: install tracefit's extra evaluate"
BASELINES = ("trees", "ridge")


class RequestScore(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of one model over single requests, ratios."""

    model: str
    ttft_median: float
    ttft_p90: float
    tpot_median: float
    tpot_p90: float


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every model on the requests of one capture; ``note`` says why one is missing."""

    learned: int
    judged: int
    scores: list[RequestScore]
    note: str = ""


class Times(NamedTuple):
    """Predicted times of each request, us."""

    ttft_us: Floats
    tpot_us: Floats


def judge_requests(
    requests: list[ServedRequest], config: tracefit.Config | None, cut_ns: int, end_ns: int
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
    one, two = _regressor(name), _regressor(name)
    return one.fit(features, served.ttft_us[learned]), two.fit(features, served.tpot_us[learned])


def _regressor(name: str) -> Any:
    if name == "trees":
        from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - an extra, and a second to import

        return HistGradientBoostingRegressor(random_state=0)
    from sklearn.linear_model import BayesianRidge  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    return make_pipeline(StandardScaler(), BayesianRidge())


def _request_score(model: str, times: Times, served: ServedRequests, judged: Mask) -> RequestScore:
    ttft, tpot = (
        np.abs(predicted / observed[judged] - 1.0)
        for predicted, observed in ((times.ttft_us, served.ttft_us), (times.tpot_us, served.tpot_us))
    )
    return RequestScore(
        model=model,
        ttft_median=float(np.median(ttft)),
        ttft_p90=float(np.quantile(ttft, 0.9)),
        tpot_median=float(np.median(tpot)),
        tpot_p90=float(np.quantile(tpot, 0.9)),
    )


# --- pages ------------------------------------------------------------------------------------------------------------

LINE_POINTS_MIN = 10
LINE_RANGE = (0.15, 0.85)


def fit_line(kv_usage: Floats, itl_s: Floats, *, points_min: int = LINE_POINTS_MIN) -> tuple[float, float] | None:
    """(A, B), or None where the points are too few; points outside the range do not count if enough are inside."""
    inside = (kv_usage >= LINE_RANGE[0]) & (kv_usage <= LINE_RANGE[1])
    if int(np.count_nonzero(inside)) < points_min:
        inside = np.isfinite(kv_usage)
    if int(np.count_nonzero(inside)) < points_min:
        return None
    columns = np.stack((kv_usage[inside], np.ones(int(np.count_nonzero(inside)))), axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, itl_s[inside], rcond=None)
    return float(a), float(b)


WINDOW_S = 15.0
_DECODED_MIN = 10
_DECODING = STEP_FEATURES.index("decode_requests")
TRACEFIT, LINE = "tracefit", "ITL = A k + B"


class TimedReading(NamedTuple):
    """One engine's counters at one time."""

    unix_ns: int
    mono_ns: int
    reading: EngineReading


class LatencyScore(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of one model over the scored windows, or why it has none."""

    model: str
    mean: float | None = None
    median: float | None = None
    note: str = ""


class PageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's recorded pages: how well its mean inter-token latency is foretold."""

    name: str
    pages: int
    learned_rows: int
    windows: int
    scores: list[LatencyScore]


class _Window(NamedTuple):
    """Means over one window."""

    rows: RowBlock
    itl_us: float
    kv_usage: float


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


def page_rows(readings: Sequence[TimedReading], whole: PageEngine | None = None) -> RowBlock | None:
    """Rows of an engine that was scraped so; ``whole`` knows how many front ends it has."""
    found = _scraped(readings, whole).advance()
    return found[0].rows if found else None


def _scraped(readings: Sequence[TimedReading], whole: PageEngine | None = None) -> PageEngine:
    engine = PageEngine("recording", "", 0)
    if whole is not None:
        engine.windows.take_front_ends_of(whole.windows)
    for timed in readings:
        engine.add(timed.unix_ns, timed.mono_ns, timed.reading)
    return engine


def evaluate_pages(name: str, readings: Sequence[TimedReading], learn_until: float) -> PageReport:
    """One engine's report."""
    begin_ns, end_ns = readings[0].unix_ns, readings[-1].unix_ns
    cut_ns = begin_ns + int(learn_until * (end_ns - begin_ns))
    rows = page_rows([timed for timed in readings if timed.unix_ns <= cut_ns])
    learned = fit("portable", Target.STEP_TIME, {}, rows) if rows is not None else None
    windows, scores = score_windows(readings, learned, cut_ns)
    return PageReport(
        name=name,
        pages=len(readings),
        learned_rows=0 if rows is None else len(rows),
        windows=windows,
        scores=scores,
    )


def score_windows(readings: Sequence[TimedReading], learned: Fit | None, cut_ns: int) -> tuple[int, list[LatencyScore]]:
    """Scored windows, and each model's errors over them: ``learned`` as it is, the others from before the cut."""
    edges = np.arange(readings[0].unix_ns, readings[-1].unix_ns, int(WINDOW_S * 1e9))
    at_ns = np.array([timed.unix_ns for timed in readings])
    whole = _scraped(readings)
    windows, ends_ns = [], []
    for low_ns, high_ns in itertools.pairwise(edges):
        first, last = np.searchsorted(at_ns, low_ns), np.searchsorted(at_ns, high_ns, side="right")
        window = _window(readings[int(first) : int(last)], whole)
        if window is not None:
            windows.append(window)
            ends_ns.append(int(high_ns))
    after = np.array(ends_ns, np.int64) > cut_ns
    if not after.any():
        return 0, []
    observed_us = np.array([window.itl_us for window in windows])
    scores = [
        LatencyScore(model=TRACEFIT, note="too few rows to begin")
        if learned is None
        else _score(TRACEFIT, np.array([_predicted(learned, window.rows) for window in windows]), observed_us, after),
        _line_score(windows, observed_us, after),
    ]
    return int(np.count_nonzero(after)), scores


def _window(inside: Sequence[TimedReading], whole: PageEngine) -> _Window | None:
    rows = page_rows(inside, whole) if len(inside) > 1 else None
    if rows is None:
        return None
    first, last = inside[0].reading.values, inside[-1].reading.values

    def delta(meaning: Meaning) -> float:
        return last[meaning] - first[meaning]

    decoded = delta(Meaning.ITL_COUNT)
    if not decoded >= _DECODED_MIN:  # a page without latencies has NaN
        return None
    return _Window(
        rows,
        itl_us=1e6 * delta(Meaning.ITL_SECONDS) / decoded,
        kv_usage=float(np.mean([timed.reading.values[Meaning.KV_USAGE_RATIO] for timed in inside])),
    )


def _predicted(learned: Fit, rows: RowBlock) -> float:
    decoding = np.add.reduceat(rows.raw[:, _DECODING], rows.offsets[:-1]) / rows.steps
    predicted_us = learned.predict(rows)
    known = np.isfinite(predicted_us)
    weight = float((decoding * rows.steps)[known].sum())
    return float((predicted_us * decoding)[known].sum()) / weight if weight > 0.0 else float("nan")


def _line_score(windows: Sequence[_Window], observed_us: Floats, after: Mask) -> LatencyScore:
    """By its own rule, else by what there is, and then it is said."""
    kv_usage, points = np.array([window.kv_usage for window in windows]), int(np.count_nonzero(~after))
    if points < 2 or not np.ptp(kv_usage) > 0.0:  # noqa: PLR2004 -- a line
        return LatencyScore(model=LINE, note="no line through the windows learned from")
    line = fit_line(kv_usage[~after], observed_us[~after], points_min=min(points, LINE_POINTS_MIN))
    if line is None:
        return LatencyScore(model=LINE, note="no KV usage on the pages")
    note = f"{points} windows, its own rule wants {LINE_POINTS_MIN}" if points < LINE_POINTS_MIN else ""
    return _score(LINE, line[0] * kv_usage + line[1], observed_us, after, note)


def _score(model: str, predicted_us: Floats, observed_us: Floats, after: Mask, note: str = "") -> LatencyScore:
    error = np.abs(predicted_us / observed_us - 1.0)[after]
    error = error[np.isfinite(error)]
    if not len(error):
        return LatencyScore(model=model, note=note)
    return LatencyScore(model=model, mean=float(error.mean()), median=float(np.median(error)), note=note)
