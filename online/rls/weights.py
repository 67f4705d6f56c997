"""Weights of rows: Huber's, relative to the prediction; and the first fit, which has no prediction yet.

    f = max(clip(yhat, y/2, 2y), 0.2 m l)          m: running median of y per step
    u = (y - yhat) sqrt(weight l) / f              relative residual of one step (rows that overlap have weight < 1:
                                                   this one tells of weight l steps alone)
    h = min(1, 2.5 / (|u| / s))                    Huber's share, 1 for a normal row
    w = weight l / f^2 h

f is clipped because plain 1 / yhat^2 runs away: a huge yhat makes its own misfit look small. The floor keeps a tiny y
from owning the fit. The scale s moves toward 1.4826 median |u| of each block by a bounded factor.

For a mean fit (post_decode: a robust fit is far off in the mean of a skewed time) w = weight / m0^2, h = 1, with m0 the
median of the start-up rows: least squares, whose residuals sum to zero.

The first 256 rows are held and fitted together: 6 passes with Huber's weights from a start at 1 / y^2, then 3 with
Tukey's, which drop what is beyond 4.7 scales. A warm-up that is 20 % of the rows and all of one batch size is out of
Huber's reach but not of Tukey's.

Guarantee: for finite y > 0 and finite x beta, w is finite and 0 <= w <= weight l / (0.2 m l)^2.
References: Huber, Robust Statistics (1981), 7.8; Holland and Welsch (Comm. Stat. 1977), for the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from online.blocks import Design, median_of
from online.constants import BISQUARE, MAD_TO_SD, QUIETEST
from online.rows import Floats
from online.state import Stateful

# Guess: cut in scales; Huber's own 1.345 is the one for 95 % efficiency.
HUBER = 2.5
# Guard: a tiny y does not own the fit.
FLOOR = 0.2
# Guess: share of the way in one block of 32 rows.
_SCALE_RATE = 0.15
# Guess: rows that the running median remembers.
_MEDIAN_ROWS = 512.0
# Guess: passes after which the first fit stands.
_HUBER_PASSES, _PASSES = 6, 9


class Weighing(Stateful):
    """Weights of rows, and what they follow.

    Args:
        robust: False = a mean fit.

    Attributes:
        scale: s.
        median_us: m, running.
        start_median_us: m0, of the start-up rows.
    """

    SAVED = ("scale", "median_us", "start_median_us")

    def __init__(self, *, robust: bool) -> None:
        self.robust = robust
        self.scale = 0.05
        self.median_us = self.start_median_us = 0.0

    def weigh(self, block: Design, prediction: Floats) -> tuple[Floats, Floats]:
        """Huber's shares and weights, (n,) each; scale and median move with the rows."""
        rate = min(1.0, len(block) / _MEDIAN_ROWS)
        floor = FLOOR * self.median_us * block.steps
        self.median_us += rate * (middle(block.elapsed_us / block.steps) - self.median_us)
        if not self.robust:
            return np.ones(len(block)), block.weight / self.start_median_us**2
        u, per_unit = relative(block.elapsed_us, np.sqrt(block.steps * block.weight), prediction, floor)
        share = shares(u, self.scale)
        spread = max(MAD_TO_SD * middle(np.abs(u)), QUIETEST)
        self.scale *= min(max(spread / self.scale, 0.5), 2.0) ** (_SCALE_RATE * min(1.0, len(u) / 32.0))
        return share, share * per_unit * per_unit


@dataclass(frozen=True, slots=True)
class Start:
    """Result of the first fit: final weights and shares (n,), robust scale."""

    weight: Floats
    share: Floats
    scale: float


def fit_start(z: Floats, row_weight: Floats, solve_for: Callable[[Floats, float], Floats], *, robust: bool) -> Start:
    """Fit rows z (n, q), y in column -2 and l in column -1.

    Args:
        z: augmented rows.
        row_weight: weight of each row, (n,).
        solve_for: solves for beta (p,) from z'Wz (q, q) and the scale, and keeps it.
        robust: False = least squares with constant weights (a mean fit).
    """
    y, steps = z[:, -2], z[:, -1]
    x, root = z[:, :-2], np.sqrt(steps * row_weight)
    median_us = median_of(y / steps)
    floor = FLOOR * median_us * steps
    scale = 0.05
    if not robust:
        weight = row_weight / median_us**2
        beta = solve_for((z * weight[:, None]).T @ z, scale)
        u, _ = relative(y, root, x @ beta, floor)
        return Start(weight, np.ones(len(z)), _scale_of(u))
    share, weight = np.ones(len(z)), row_weight
    u, per_unit = relative(y, root, y, floor)
    for i in range(_PASSES):
        h = shares(u, scale)
        cut = bisquare(u / scale) if i >= _HUBER_PASSES else 1.0
        weight, share = h * per_unit * per_unit * cut, h * cut
        beta = solve_for((z * weight[:, None]).T @ z, scale)
        u, per_unit = relative(y, root, x @ beta, floor)
        scale = _scale_of(u)
    return Start(weight, share, scale)


def relative(y: Floats, root_steps: Floats, prediction: Floats, floor: Floats) -> tuple[Floats, Floats]:
    """U and sqrt(l) / f of rows against their predictions, (n,) each."""
    f = np.maximum(np.minimum(np.maximum(prediction, 0.5 * y), 2.0 * y), floor)
    root = root_steps / f
    return (y - prediction) * root, root


def shares(u: Floats, scale: float) -> Floats:
    """Huber's h of relative residuals (n,)."""
    h: Floats = HUBER / np.maximum(np.abs(u) / scale, HUBER)
    return h


def bisquare(z: Floats) -> Floats:
    """Tukey's share for normalised residuals z: 0 beyond 4.685, where Huber still listens."""
    inside: Floats = np.maximum(0.0, 1.0 - (z / BISQUARE) ** 2)
    return inside * inside


def middle(values: Floats) -> float:
    """Upper median, (n,): no averaging, so that it is one of the values."""
    half = len(values) // 2
    return float(np.partition(values, half)[half])


def _scale_of(u: Floats) -> float:
    """Scale of a whole sample of relative residuals (n,)."""
    return max(QUIETEST, MAD_TO_SD * median_of(np.abs(u)))
