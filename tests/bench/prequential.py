"""Prequential runs: predict every block of rows, then learn it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.config import Config
from online.rows import Target
from online.target import TargetState


@dataclass
class Run:
    """Prequential predictions of one run, all (n,), NaN before the first fit; and the learner at its end."""

    model: object
    y: np.ndarray
    slow: np.ndarray
    shaped: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def ape(self, which):
        """Relative error of ``slow`` or ``shaped``, (n,)."""
        return np.abs(getattr(self, which) - self.y) / self.y

    def covered(self):
        """Whether each row fell between P10 and P90, (n,)."""
        return (self.y >= self.low) & (self.y <= self.high)


def prequential(rows, features, hook=None, *, settings=None):
    """Predict every block of rows, then learn it; hook(rows so far, learner) after each block.

    Blocks are short, or as long as live ones of these ``settings``.
    """
    live = settings is not None
    settings = settings or Config(learners=("rls",))
    state = TargetState(Target.STEP_TIME, settings)
    state.offer(features, lambda _features: None)
    design = state.matrix.evaluate(rows).design
    model = state.models[features.name]
    model.learns_intervals = True  # where those of x beta F are published, nobody else reads them
    n = len(design)
    run = Run(model, design.elapsed_us, *(np.full(n, np.nan) for _ in range(4)))
    at = 0
    if live:
        state._size_blocks()
    for block in state.cutter.push(design):
        here = slice(at, at + len(block))
        if model.started:
            run.slow[here] = block.x @ model.fit.beta[: len(features)]
            run.shaped[here] = run.slow[here] * np.exp(model.log_factors(block.cell))
            band = model.intervals.snapshot(by_stratum=False)
            if band is not None:
                run.low[here], run.high[here] = run.slow[here] * band.p10, run.slow[here] * band.p90
        model.learn(block)
        at += len(block)
        if live:
            state._size_blocks()
        if hook is not None:
            hook(at, model)
    return run
