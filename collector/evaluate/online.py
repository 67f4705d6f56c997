"""Predict, then learn: every step of a recording is predicted by what was known before it, from the first one on.

The protocol of NVIDIA's benchmark of its online regression: predictions come before updates, nothing is left out at the
beginning, and what a model does not predict yet is missing from its errors and counted.

    MAPE, p95     mean and 95th percentile of |yhat - y| / y over the rows that the model predicts
    missing       share of the rows that it does not predict
    last 30 %     MAPE over the end of each recording, where learning goes on
    macro, micro  over recordings, each counting once, and over all rows

Rows of one step each are taken. ``tracefit`` is what a running one predicts the next step with, x beta F exp(level);
``tracefit beta`` the coefficients alone. Both learn 32 rows at a time, hence know less than the protocol allows, and
are missing while the first 256 rows are held: until then nothing is known of their error, and nothing is usable.
``grid of 64`` is written after the published description of the default of that regression:

    A = H + K + H P / N + P^2 / (2 N) + P / 2        M = P + B        one plane each for decode, prefill and mixed steps

with P tokens and N requests of prefill, H tokens that they had computed before, B requests and K tokens of decode. A
plane y = a + b A + c M, b, c >= 0, is fitted anew with each row by least squares over at most 64 rows. Beyond that the
oldest of the fullest of 4 x 4 cells goes; cells are equal in log(1 + A) and log(1 + M). A plane needs five rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from collector import __version__
from collector.identity import Fact
from collector.runtime import PrintLine
from online import STEP_FEATURES, Floats, Level, RowBlock, Target
from online.features import portable
from online.rls import solve

from .captures import Capture
from .systems import Score, mean, predict_ahead

LAST_SHARE = 0.3
TRACEFIT, COEFFICIENTS, GRID = "tracefit", "tracefit beta", "grid of 64"
CAPACITY, BINS, ROWS_MIN = 64, 4, 5
_FLAT = 1e-12
_FLOOR_US = 1e-3


class OnlineCase(msgspec.Struct, frozen=True, kw_only=True):
    """One target of one configuration of a recording."""

    name: str
    target: str
    rows: int
    scores: list[Score]


class OnlineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every case, and each model's means over cases and over rows."""

    schema: str
    tracefit_version: str
    cases: list[OnlineCase]
    macro: list[Score]
    micro: list[Score]


def predict_then_learn(captures: Sequence[Capture], tell: PrintLine) -> OnlineReport:
    """Run the protocol; deterministic. Configurations without rows of one step are not there."""
    cases: list[OnlineCase] = []
    errors: dict[str, list[Floats]] = {}
    for capture in captures:
        for target in (Target.STEP_TIME, Target.GPU_TIME):
            rows = _single_steps(capture, target)
            if not len(rows):
                continue
            tell(f"{capture.name}: {target.value}")
            found = _predictions(rows, target, capture.facts)
            scores = []
            for name, predicted_us in found.items():
                error = np.abs(predicted_us / rows.elapsed_us - 1.0)
                errors.setdefault(name, []).append(error)
                scores.append({**_score(name, error), "last": _last(error)})
            cases.append(OnlineCase(name=capture.name, target=target.value, rows=len(rows), scores=scores))
    return OnlineReport(
        schema="tracefit.predict-then-learn/1",
        tracefit_version=__version__,
        cases=cases,
        macro=[_macro(name, [s for case in cases for s in case.scores if s["model"] == name]) for name in errors],
        micro=[_score(name, np.concatenate(each)) for name, each in errors.items()],
    )


def _single_steps(capture: Capture, target: Target) -> RowBlock:
    """Rows of one step with a time, in the order in which they ended."""
    delivered = capture.full.get(target)
    if delivered is None:
        return RowBlock.empty(target.vocabulary)
    rows = delivered.rows
    usable = np.flatnonzero((rows.steps == 1) & (rows.elapsed_us > 0.0))
    return rows.take(usable[np.argsort(rows.end_ns[usable], kind="stable")])


def _column(raw: Floats, name: str) -> Floats:
    return np.nan_to_num(raw[:, STEP_FEATURES.index(name)])


def _score(model: str, errors: Floats) -> Score:
    """One model over rows; None where it predicts none of them."""
    known = errors[np.isfinite(errors)]
    p95 = float(np.quantile(known, 0.95)) if len(known) else None
    return {"model": model, "mape": mean(known), "p95": p95, "missing": 1.0 - len(known) / len(errors)}


def _last(errors: Floats) -> float | None:
    end = errors[int((1.0 - LAST_SHARE) * len(errors)) :]
    return mean(end[np.isfinite(end)])


def _macro(model: str, scores: Sequence[Score]) -> Score:
    figures = {name: [score[name] for score in scores] for name in ("mape", "p95", "missing", "last")}
    return {"model": model} | {name: mean([v for v in each if v is not None]) for name, each in figures.items()}


def _predictions(rows: RowBlock, target: Target, facts: dict[str, Fact]) -> dict[str, Floats]:
    """Microseconds per row by each model, (n,); NaN where it does not predict."""
    shaped, plain = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    features, level = portable(target, facts), Level()
    for at, block, predicted_us, log_factor in predict_ahead(features, features, rows):
        plain[at] = np.maximum(predicted_us, _FLOOR_US)
        log_ratio = np.log(block.elapsed_us / plain[at]) - log_factor
        shaped[at] = plain[at] * np.exp(log_factor + level.learn(block, log_ratio))
    return {TRACEFIT: shaped, COEFFICIENTS: plain, GRID: _by_grid(rows)}


def _by_grid(rows: RowBlock) -> Floats:
    raw = rows.raw
    tokens, requests = _column(raw, "prefill_tokens"), np.maximum(_column(raw, "prefill_requests"), 1.0)
    pairs = _column(raw, "prefill_attention")
    before = np.maximum(pairs * requests / np.maximum(tokens, 1.0) - tokens / 2.0, 0.0) * (tokens > 0.0)
    attention = before + _column(raw, "decode_context_tokens") + pairs + tokens / 2.0
    x = np.stack((attention, tokens + _column(raw, "decode_requests")), axis=1)
    predicted = np.full(len(rows), np.nan)
    prefill, decode = tokens > 0.0, _column(raw, "decode_requests") > 0.0
    for mask in (~prefill, prefill & ~decode, prefill & decode):
        plane = GridRegression()
        for number in np.flatnonzero(mask).tolist():
            predicted[number] = plane.predict(x[number])
            plane.learn(x[number], float(rows.elapsed_us[number]))
    return predicted


class GridRegression:
    """One plane over the rows that a grid retains; see the module."""

    def __init__(self) -> None:
        self._x, self._y = np.empty((0, 2)), np.empty(0)
        self._low, self._high = np.full(2, np.inf), np.full(2, -np.inf)
        self._plane: tuple[Floats, float] | None = None

    def predict(self, x: Floats) -> float:
        """Microseconds of a row (2,); NaN while there is no plane."""
        if self._plane is None:
            return float("nan")
        slopes, intercept = self._plane
        return max(float(x @ slopes) + intercept, _FLOOR_US)

    def learn(self, x: Floats, elapsed_us: float) -> None:
        """Retain a row, let go of another if there are too many, and fit."""
        self._x, self._y = np.vstack((self._x, x)), np.append(self._y, elapsed_us)
        at = np.log1p(x)
        self._low, self._high = np.minimum(self._low, at), np.maximum(self._high, at)
        if len(self._y) > CAPACITY:
            width = np.maximum(self._high - self._low, np.finfo(float).tiny)
            cells = np.minimum((np.log1p(self._x) - self._low) / width * BINS, BINS - 1).astype(int) @ (BINS, 1)
            oldest = int(np.argmax(cells == np.bincount(cells).argmax()))
            self._x, self._y = np.delete(self._x, oldest, axis=0), np.delete(self._y, oldest)
        if len(self._y) >= ROWS_MIN:
            self._fit()

    def _fit(self) -> None:
        """Least squares with b, c >= 0; a plane without a slope takes the place of no other."""
        middle, y_mean = self._x.mean(axis=0), float(self._y.mean())
        varies = self._x.std(axis=0) > _FLAT * np.maximum(1.0, np.abs(middle))
        u, none = (self._x - middle) * varies, np.zeros(2, np.bool_)
        slopes = solve(u.T @ u, u.T @ (self._y - y_mean), none, varies).beta
        if slopes.any():
            self._plane = slopes, y_mean - float(slopes @ middle)
        elif not varies.any():
            self._plane = None
