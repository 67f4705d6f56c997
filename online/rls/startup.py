"""The first fit: all held rows together, by iterated reweighting.

A robust weight needs a prediction, and the first prediction needs a robust fit. So the first rows are held, and fitted
by 6 rounds with Huber's weights from a start at 1 / y^2, then 3 with Tukey's, which drop what is beyond 4.7 scales:
a warm-up that is 20 % of the rows and all of one batch size is out of Huber's reach but not of Tukey's. Cost: 9 small
solves per block while rows are held. Reference: Holland and Welsch (Comm. Stat. 1977); Tukey's bisquare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from online.blocks import Design, median_of
from online.rows import Floats
from online.state import Stateful, Tree

from .robust import FLOOR, bisquare, irls_scale, relative, shares

# Guess: passes after which the first fit stands.
_HUBER_PASSES, _PASSES = 6, 9


# Guess: the least that a median can defend.
MIN_START_ROWS = 3


class Startup(Stateful):
    """Rows held until there are enough to fit.

    Attributes:
        held: the rows; None before the first and after the last.
        holding: whether rows are still held.
        started: whether there was a first fit.
    """

    SAVED = ("holding", "started")

    __slots__ = ("held", "holding", "start_rows", "started")

    def __init__(self, start_rows: int) -> None:
        self.start_rows = start_rows
        self.held: Design | None = None
        self.holding = True
        self.started = False

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"held": None if self.held is None else self.held.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        super().from_state(state)
        self.held = None if state["held"] is None else Design.of_state(state["held"])

    def hold(self, block: Design) -> None:
        """Hold rows back until there are enough to begin with."""
        self.held = block if self.held is None else Design.concatenate([self.held, block])

    @property
    def fittable(self) -> bool:
        """Whether the rows held are enough for a fit of all of them."""
        return self.held is not None and len(self.held) >= MIN_START_ROWS

    @property
    def complete(self) -> bool:
        """Whether the rows held are enough to become statistics."""
        return self.held is not None and len(self.held) >= self.start_rows

    def end(self) -> None:
        """The rows have become statistics."""
        self.held, self.holding = None, False


@dataclass(frozen=True, slots=True)
class Start:
    """Result: final weights and shares (n,), robust scale."""

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
        return Start(weight, np.ones(len(z)), irls_scale(u))
    share, weight = np.ones(len(z)), row_weight
    u, per_unit = relative(y, root, y, floor)
    for i in range(_PASSES):
        h = shares(u, scale)
        cut = bisquare(u / scale) if i >= _HUBER_PASSES else 1.0
        weight, share = h * per_unit * per_unit * cut, h * cut
        beta = solve_for((z * weight[:, None]).T @ z, scale)
        u, per_unit = relative(y, root, x @ beta, floor)
        scale = irls_scale(u)
    return Start(weight, share, scale)
