"""Weights of rows: Huber's, relative to the prediction; and the first fit, which has no prediction yet.

    f = max(clip(yhat, y/2, 2y), 0.2 m l)          m: running median of y per step
    u = (y - yhat) sqrt(weight l) / f              relative residual of one step (rows that overlap have weight < 1:
                                                   this one tells of weight l steps alone)
    h = min(1, 2.5 / (|u| / s))                    Huber's share, 1 for a normal row
    w = weight l / f^2 h

f is clipped because plain 1 / yhat^2 runs away: a huge yhat makes its own misfit look small. The floor keeps a tiny y
from owning the fit. The scale s moves toward 1.4826 median |u| of each block by a bounded factor.

A mean fit (of times that are skewed and add up, where a robust fit is far off) has w = weight / m^2 and h = 1, with m
that of the first rows: least squares, whose residuals sum to zero.

The first 256 rows are fitted together: passes with Huber's weights from a start at 1 / y^2, then with Tukey's, which
drop what is beyond 4.7 scales. A warm-up that is 20 % of the rows and all of one batch size is out of Huber's reach but
not of Tukey's.

References: Huber, Robust Statistics (1981), 7.8; Holland and Welsch (Comm. Stat. 1977), for the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from online.blocks import median_of
from online.constants import BISQUARE, MAD_TO_SD, NOISE_ROWS, QUIETEST
from online.rows import Floats

# Guess: cut in scales; Huber's own 1.345 is the one for 95 % efficiency.
HUBER = 2.5
# Guard: a tiny y does not own the fit. Guess: rows that the running median remembers.
_FLOOR, _MEDIAN_ROWS = 0.2, 512.0
# Guess: share of the way that the scale goes in one block of 32 rows; the scale before there is any.
_SCALE_RATE, FIRST_SCALE = 0.15, 0.05
# Guess: passes after which the first fit stands.
_HUBER_PASSES, _PASSES = 6, 9


def relative(y: Floats, steps: Floats, weight: Floats, prediction: Floats, m: float) -> tuple[Floats, Floats]:
    """U and sqrt(weight l) / f of rows of so many steps and weights against their predictions, (n,) each."""
    f = np.maximum(np.minimum(np.maximum(prediction, 0.5 * y), 2.0 * y), _FLOOR * m * steps)
    root = np.sqrt(steps * weight) / f
    return (y - prediction) * root, root


def huber(u: Floats, scale: float) -> Floats:
    """Huber's h of relative residuals (n,)."""
    h: Floats = HUBER / np.maximum(np.abs(u) / scale, HUBER)
    return h


def bisquare(z: Floats) -> Floats:
    """Tukey's share for normalised residuals z: 0 beyond 4.685, where Huber still listens."""
    inside: Floats = np.maximum(0.0, 1.0 - (z / BISQUARE) ** 2)
    return inside * inside


def scale_of(u: Floats) -> float:
    """Scale of a sample of relative residuals (n,)."""
    return max(QUIETEST, MAD_TO_SD * median_of(np.abs(u)))


def moved(scale: float, u: Floats) -> float:
    """The running scale after a block of relative residuals (n,)."""
    share = _SCALE_RATE * min(1.0, len(u) / NOISE_ROWS)
    spread = max(MAD_TO_SD * _middle(np.abs(u)), QUIETEST)
    return float(scale * min(max(spread / scale, 0.5), 2.0) ** share)


def moved_median(median_us: float, per_step_us: Floats) -> float:
    """The running median after a block of times per step (n,)."""
    return median_us + min(1.0, len(per_step_us) / _MEDIAN_ROWS) * (_middle(per_step_us) - median_us)


def _middle(values: Floats) -> float:
    """Upper median, (n,)."""
    half = len(values) // 2
    return float(np.partition(values, half)[half])


@dataclass(frozen=True, slots=True)
class Start:
    """Result of the first fit: final weights and shares (n,), robust scale, and m."""

    weight: Floats
    share: Floats
    scale: float
    median_us: float


def fit_start(z: Floats, row_weight: Floats, solve_for: Callable[[Floats, float], Floats], *, robust: bool) -> Start:
    """Fit rows z (n, q), y in column -2 and l in column -1.

    Args:
        z: augmented rows.
        row_weight: weight of each row, (n,).
        solve_for: solves for beta (p,) from z'Wz (q, q) and the scale, and keeps it.
        robust: False = least squares with constant weights (a mean fit).
    """
    x, y, steps = z[:, :-2], z[:, -2], z[:, -1]
    median_us = median_of(y / steps)
    scale, share, weight = FIRST_SCALE, np.ones(len(z)), row_weight / median_us**2
    if not robust:
        prediction = x @ solve_for((z * weight[:, None]).T @ z, scale)
        u, _ = relative(y, steps, row_weight, prediction, median_us)
        return Start(weight, share, scale_of(u), median_us)
    u, per_unit = relative(y, steps, row_weight, y, median_us)
    for i in range(_PASSES):
        cut = bisquare(u / scale) if i >= _HUBER_PASSES else 1.0
        share = huber(u, scale) * cut
        weight = share * per_unit * per_unit
        prediction = x @ solve_for((z * weight[:, None]).T @ z, scale)
        u, per_unit = relative(y, steps, row_weight, prediction, median_us)
        scale = scale_of(u)
    return Start(weight, share, scale, median_us)
