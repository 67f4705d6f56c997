"""Predict, then learn: every step of a recording is predicted by what was known before it, from the first one on.

The protocol of NVIDIA's benchmark of its online regression: predictions come before updates, nothing is left out at the
beginning, and what a model does not predict yet is missing from its errors and counted.

    MAPE, p95     mean and 95th percentile of |yhat - y| / y over the rows that the model predicts
    missing       share of the rows that it does not predict
    macro, micro  over recordings, each counting once, and over all rows

Rows of one step each are taken. ``tracefit`` is what a running one predicts the next step with, x beta F exp(level);
``tracefit beta`` the coefficients alone. Both learn 32 rows at a time, hence know less than the protocol allows, and
are missing while the first 256 rows are held: until then nothing is known of their error, and nothing is usable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collector import __version__
from collector.config import Config
from collector.identity import Fact
from online import Floats, Level, RowBlock, Target
from online.features import portable
from online.target import TargetState

from .captures import Capture
from .systems import BLOCK_ROWS, Document, Score, design, mean

TRACEFIT, COEFFICIENTS = "tracefit", "tracefit beta"
_FLOOR_US = 1e-3


def predict_then_learn(captures: Sequence[Capture]) -> Document:
    """Run the protocol; deterministic. Configurations without rows of one step are not there."""
    cases: list[Document] = []
    errors: dict[str, list[Floats]] = {}
    for capture in captures:
        for target in (Target.STEP_TIME, Target.GPU_TIME):
            rows = _single_steps(capture, target)
            if not len(rows):
                continue
            scores = []
            for name, predicted_us in _predictions(rows, target, capture.facts).items():
                error = np.abs(predicted_us / rows.elapsed_us - 1.0)
                errors.setdefault(name, []).append(error)
                scores.append(_score(name, error))
            cases.append({"name": capture.name, "target": target.value, "rows": len(rows), "scores": scores})
    return {
        "schema": "tracefit.predict-then-learn/1",
        "tracefit_version": __version__,
        "cases": cases,
        "macro": [_macro(name, [s for case in cases for s in case["scores"] if s["model"] == name]) for name in errors],
        "micro": [_score(name, np.concatenate(each)) for name, each in errors.items()],
    }


def _single_steps(capture: Capture, target: Target) -> RowBlock:
    """Rows of one step with a time, in the order in which they ended."""
    rows = capture.all_rows(target)
    usable = np.flatnonzero((rows.steps == 1) & (rows.elapsed_us > 0.0))
    return rows.take(usable[np.argsort(rows.end_ns[usable], kind="stable")])


def _score(model: str, errors: Floats) -> Score:
    """One model over rows; None where it predicts none of them."""
    known = errors[np.isfinite(errors)]
    p95 = float(np.quantile(known, 0.95)) if len(known) else None
    return {"model": model, "mape": mean(known), "p95": p95, "missing": 1.0 - len(known) / len(errors)}


def _macro(model: str, scores: Sequence[Score]) -> Score:
    figures = {name: [score[name] for score in scores] for name in ("mape", "p95", "missing")}
    return {"model": model} | {name: mean([v for v in each if v is not None]) for name, each in figures.items()}


def _predictions(rows: RowBlock, target: Target, facts: dict[str, Fact]) -> dict[str, Floats]:
    """Microseconds per row by each model, (n,); NaN where it does not predict."""
    shaped, plain = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    features, level, state = portable(target, facts), Level(), TargetState(target, Config(learners=("rls",)))
    state.add_features(features)
    learner = state.models[features.name]
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows.slice(start, min(start + BLOCK_ROWS, len(rows)))
        block, numbers = design(features, part)
        if not learner.in_burn_in and len(block):
            at, log_factor = start + numbers, learner.log_factors(block.cell)
            plain[at] = np.maximum(learner.predict(block), _FLOOR_US)
            log_ratio = np.log(block.elapsed_us / plain[at]) - log_factor
            shaped[at] = plain[at] * np.exp(log_factor + level.learn(block, log_ratio))
        state.learn(part)
    return {TRACEFIT: shaped, COEFFICIENTS: plain}
