"""Recorded pages, scored beside what users of a ``/metrics`` page have otherwise: mean inter-token latency of windows.

    observed      sum of latencies / count, of a window of 15 s
    tracefit      sum_r d_r (x_r beta) / sum_r d_r l_r      over rows of the window; d: mean decoding requests, l: steps
    line, kalman  of the window's means, see page_baselines

Learned on the first part of the time, scored frozen on the rest; every model is told the window's load, as it is.
Microseconds; a window in which fewer than ten tokens followed another is left out.

What users of a ``/metrics`` page have otherwise: two models of the mean inter-token latency of a window.

    line      ITL = A k + B, k: mean KV usage; ordinary least squares over at least ten points with 0.15 <= k <= 0.85
    kalman    state (alpha, beta, gamma):  ITL = alpha + beta B,  TTFT = alpha + gamma P     B: batch, P: prompt tokens
              random walk with 1 % process noise per cycle, 10 % observation noise

Both average over the cycle; neither knows a step. ``points_min`` 10 is the line's own rule; a shorter recording has
none by it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from collector.decode.pages import EngineReading, Meaning
from collector.join.pages import PageEngine
from collector.recordings import TimedPage, merged, open_recordings
from online import STEP_FEATURES, Floats, Mask, RowBlock, Target

from .fits import Fit, fit

LINE_POINTS_MIN = 10
LINE_RANGE = (0.15, 0.85)
_PROCESS, _OBSERVATION = 0.01, 0.10


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


@dataclass(slots=True)
class KalmanCycle:
    """One update per cycle of means."""

    state: Floats = field(default_factory=lambda: np.zeros(3))
    covariance: Floats = field(default_factory=lambda: np.eye(3) * 1e6)

    def learn(self, batch: float, prompt_tokens: float, itl_s: float, ttft_s: float) -> None:
        """Take the means of one cycle."""
        observe = np.array([[1.0, batch, 0.0], [1.0, 0.0, prompt_tokens]])
        seen = np.array([itl_s, ttft_s])
        known = np.isfinite(observe).all(axis=1) & np.isfinite(seen)
        observe, seen = observe[known], seen[known]
        if not len(seen):
            return
        self.covariance = self.covariance + np.diag((_PROCESS * np.maximum(np.abs(self.state), 1e-9)) ** 2)
        noise = np.diag((_OBSERVATION * np.maximum(seen, 1e-9)) ** 2)
        gain = self.covariance @ observe.T @ np.linalg.inv(observe @ self.covariance @ observe.T + noise)
        self.state = self.state + gain @ (seen - observe @ self.state)
        self.covariance = (np.eye(3) - gain @ observe) @ self.covariance

    def predict(self, batch: float) -> float:
        """Mean inter-token latency at a batch, in seconds."""
        return float(max(self.state[0] + self.state[1] * batch, 0.0))


WINDOW_S = 15.0
_DECODED_MIN = 10
_DECODING = STEP_FEATURES.index("decode_requests")
TRACEFIT, LINE, KALMAN = "tracefit", "ITL = A k + B", "Kalman on cycle means"


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
    ttft_us: float
    kv_usage: float
    batch: float
    prompt_tokens: float


def load_pages(paths: Sequence[Path]) -> dict[str, list[TimedReading]]:
    """Readings of each engine of one source's recordings, by name; empty if they are of something else."""
    readings: dict[str, list[TimedReading]] = {}
    path = paths[0]
    name = path.parent.name if path.name.startswith("pages.") else path.name.split(".")[0]
    for timed in merged(open_recordings(paths, lambda _: None)):  # what is wrong with them was said before
        if isinstance(timed, TimedPage):
            page = timed.page
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
        _kalman_score(windows, observed_us, after),
    ]
    return int(np.count_nonzero(after)), scores


def _window(inside: Sequence[TimedReading], whole: PageEngine) -> _Window | None:
    rows = page_rows(inside, whole) if len(inside) > 1 else None
    if rows is None:
        return None
    first, last = inside[0].reading.values, inside[-1].reading.values

    def delta(meaning: Meaning) -> float:
        return last[meaning] - first[meaning]

    def mean(meaning: Meaning) -> float:
        return float(np.mean([timed.reading.values[meaning] for timed in inside]))

    decoded, started = delta(Meaning.ITL_COUNT), max(delta(Meaning.FIRST_TOKENS), 1.0)
    if not decoded >= _DECODED_MIN:  # a page without latencies has NaN
        return None
    return _Window(
        rows,
        itl_us=1e6 * delta(Meaning.ITL_SECONDS) / decoded,
        ttft_us=1e6 * delta(Meaning.FIRST_TOKEN_SECONDS) / started,
        kv_usage=mean(Meaning.KV_USAGE_RATIO),
        batch=mean(Meaning.RUNNING),
        prompt_tokens=delta(Meaning.PROMPT_TOKENS) / started,
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


def _kalman_score(windows: Sequence[_Window], observed_us: Floats, after: Mask) -> LatencyScore:
    kalman = KalmanCycle()
    for window, scored in zip(windows, after, strict=True):
        if not scored:
            kalman.learn(window.batch, window.prompt_tokens, window.itl_us / 1e6, window.ttft_us / 1e6)
    if after.all():
        return LatencyScore(model=KALMAN, note="no window to learn from")
    predicted_us = np.array([1e6 * kalman.predict(window.batch) for window in windows])
    return _score(KALMAN, predicted_us, observed_us, after)


def _score(model: str, predicted_us: Floats, observed_us: Floats, after: Mask, note: str = "") -> LatencyScore:
    error = np.abs(predicted_us / observed_us - 1.0)[after]
    error = error[np.isfinite(error)]
    if not len(error):
        return LatencyScore(model=model, note=note)
    return LatencyScore(model=model, mean=float(error.mean()), median=float(np.median(error)), note=note)
