"""Relative weights with Huber's loss, and the scale they need; the defence against stalls, GC and compile steps.

    f = max(clip(yhat, y / 2, 2 y), 0.2 m l)       m: running median of y / l
    u = (y - x beta) sqrt(weight l) / f            relative residual of one step's worth
                                                   (rows that overlap, weight < 1, tell of weight l steps alone)
    h = min(1, 2.5 / (|u| / s))                    Huber's share, 1 for a normal row
    w = weight l / f^2 h

f is clipped because plain 1 / yhat^2 runs away: a huge yhat makes its own misfit look small. The floor keeps a tiny y
from owning the fit. The scale s moves toward 1.4826 median |u| of each block by a bounded factor.

For a mean fit (post_decode: a robust fit is far off in the mean of a skewed time) w = weight / m0^2, h = 1, with m0 the
median of the start-up rows: least squares, whose residuals sum to zero.

Guarantee: for finite y > 0 and finite x beta, w is finite and 0 <= w <= weight l / (0.2 m l)^2.
Reference: Huber, Robust Statistics (1981), 7.8.
"""

from __future__ import annotations

import numpy as np

from online.blocks import Design, median_of
from online.constants import BISQUARE, MAD_TO_SD
from online.rows import Floats
from online.state import Stateful

# Guess: cut in scales; Huber's own 1.345 is the one for 95 % efficiency.
HUBER = 2.5
# Guard: a tiny y does not own the fit.
FLOOR = 0.2
# Guard: no machine is quieter than 0.5 %, and weights stay finite.
SCALE_MIN = 0.005
# Guess: share of the way in one block of 32 rows.
_SCALE_RATE = 0.15
# Guard: cost of a sort.
_ENOUGH = 64
# Guess: rows that the running median remembers.
_MEDIAN_ROWS = 512.0


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

    __slots__ = ("median_us", "robust", "scale", "start_median_us")

    def __init__(self, *, robust: bool) -> None:
        self.robust = robust
        self.scale = 0.05
        self.median_us = self.start_median_us = 0.0

    def weigh(self, block: Design, prediction: Floats) -> tuple[Floats, Floats]:
        """Huber's shares and weights, (n,) each; the scale moves with the residuals."""
        if not self.robust:
            return np.ones(len(block)), block.weight / self.start_median_us**2
        # Rows that overlap (weight < 1) tell of the same steps; this one alone tells of weight * steps.
        root = np.sqrt(block.steps * block.weight)
        u, per_unit = relative(block.elapsed_us, root, prediction, FLOOR * self.median_us * block.steps)
        share = shares(u, self.scale)
        self.scale = step_scale(self.scale, u)
        return share, share * per_unit * per_unit

    def follow(self, block: Design) -> None:
        """Move the median toward this block's."""
        rate = min(1.0, len(block) / _MEDIAN_ROWS)
        self.median_us += rate * (float(middle(block.elapsed_us / block.steps)) - self.median_us)


def relative(y: Floats, root_steps: Floats, prediction: Floats, floor: Floats) -> tuple[Floats, Floats]:
    """U and sqrt(l) / f of rows against their predictions, (n,) each."""
    f = np.maximum(np.minimum(np.maximum(prediction, 0.5 * y), 2.0 * y), floor)
    root = root_steps / f
    return (y - prediction) * root, root


def shares(u: Floats, scale: float) -> Floats:
    """Huber's h of relative residuals (n,)."""
    h: Floats = HUBER / np.maximum(np.abs(u) / scale, HUBER)
    return h


def middle(values: Floats) -> Floats:
    """Upper median along the last axis: one sort, no averaging; of every k-th value where there are 128 or more."""
    n = values.shape[-1]
    if n >= 2 * _ENOUGH:
        values = values[..., :: n // _ENOUGH]
    ordered: Floats = np.sort(values, axis=-1)
    middle_value: Floats = ordered[..., ordered.shape[-1] // 2]
    return middle_value


def step_scale(scale: float, u: Floats) -> float:
    """The scale after a block of relative residuals u (n,)."""
    spread = max(MAD_TO_SD * float(middle(np.abs(u))), SCALE_MIN)
    rate = _SCALE_RATE * min(1.0, len(u) / 32.0)
    moved: float = scale * min(max(spread / scale, 0.5), 2.0) ** rate
    return moved


def irls_scale(u: Floats) -> float:
    """Scale of a whole sample of relative residuals (n,)."""
    return max(SCALE_MIN, MAD_TO_SD * median_of(np.abs(u)))


def bisquare(z: Floats) -> Floats:
    """Tukey's share for normalised residuals z: 0 beyond 4.685, where Huber still listens."""
    inside = np.maximum(0.0, 1.0 - (z / BISQUARE) ** 2)
    share: Floats = inside * inside
    return share
