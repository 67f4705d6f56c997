"""What changed between two snapshots: coefficients in standard errors, and what that does to a typical step.

    z = (b' - b) / sqrt(stderr² + form² + stderr'² + form'²)           both standard errors known, not both zero
    typical step: the means of the features in the older snapshot; its time by the coefficients then and now

The form errors count because the loads of two snapshots differ, and with them which line comes nearest to the machine.
The term that moved is told where a coefficient of the step time did:

    d = b' - b, C = the sum of both covariances        hypothesis u: d = a u, explained(u) = (u'C^-1 d)^2 / u'C^-1 u

with u = b for all terms alike, b without prefill for decode, a unit vector for one coefficient. One is named where it
leaves at most 5 % of d'C^-1 d, it goes the way the typical step does, and no other leaves less than twice as much,
9, and (0.5 %)^2 b'C^-1 b. Where some do, but none of prefill, ``not_prefill`` is named; else none is. Nor is one where
a coefficient has no standard error: C is not known then. It is asked for where a coefficient moved, or the typical step
by 5 %. Here the form errors are left out: they would hide in which term two snapshots differ.
Configurations are paired by config_id; those left over by model, GPU and tensor parallelism where that is unambiguous
(a new version of vLLM makes a new id), and at last the only one left on each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from .document import STEP_TIME, Coefficient, ConfigDocument
from .exceptions import NoCoefficientsError
from .shapes import FEATURES
from .step_model import Limits, StepModel

NOTABLE = 3.0
"""Standard errors from which on a coefficient counts as moved."""
_WORTH = 0.05
"""A typical step that takes so much more or less is worth a word."""
_LEFT, _TWICE, _QUIETEST = 0.05, 2.0, 0.005
"""As online/moved_term.py has them for a change in time."""
_SINGULAR = 1e-9
"""Guard: the share of a variance that the other coefficients leave; below it two of them are one."""


_MACHINE = ("model", "gpu", "tensor_parallel_size")


class Move(NamedTuple):
    """One coefficient in both; ``standard_errors`` is signed, None where one of the errors is not known.

    ``moved``: by more than three standard errors.
    """

    target: str
    feature: str
    unit: str
    before: float
    after: float
    standard_errors: float | None
    status_before: str
    status_after: str
    moved: bool


class TypicalStep(NamedTuple):
    """One step of the older snapshot's mean work, in microseconds by both."""

    prefill_tokens: float
    requests: float
    decode_context_tokens: float
    before_us: float
    after_us: float

    @property
    def is_other(self) -> bool:
        """Whether it takes 5 % more or less."""
        return abs(self.after_us - self.before_us) > _WORTH * self.before_us


class ConfigDiff(NamedTuple):
    """One configuration in both.

    ``step`` is None where a side cannot predict or the mean work is not known. ``term`` and ``added``: which term of
    the step time moved, and by how much, as of a :class:`SpeedChange`; empty where none did or it cannot be told.
    """

    before_id: str
    after_id: str
    moves: tuple[Move, ...]
    step: TypicalStep | None
    term: str = ""
    added: float | None = None


class Diff(NamedTuple):
    """From one snapshot to another: paired configurations, and the ids that only one of them has."""

    configs: tuple[ConfigDiff, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]


def compared(before: Sequence[ConfigDocument], after: Sequence[ConfigDocument]) -> Diff:
    """See the module's docstring."""
    old, new = list(before), list(after)
    pairs = _paired(old, new, lambda config: config.config_id)
    pairs += _paired(old, new, lambda config: tuple(map(config.facts.get, _MACHINE)))
    if len(old) == len(new) == 1:
        pairs.append((old.pop(), new.pop()))
    return Diff(
        tuple(_config_diff(*pair) for pair in pairs),
        tuple(each.config_id for each in old),
        tuple(each.config_id for each in new),
    )


def _paired(
    old: list[ConfigDocument], new: list[ConfigDocument], key: Callable[[ConfigDocument], object]
) -> list[tuple[ConfigDocument, ConfigDocument]]:
    """Take from both lists what one key names on each side exactly once."""
    pairs = []
    for this in list(old):
        wanted = key(this)
        others = [each for each in new if key(each) == wanted]
        if len(others) == 1 and sum(key(each) == wanted for each in old) == 1:
            pairs.append((this, others[0]))
            old.remove(this)
            new.remove(others[0])
    return pairs


def _config_diff(before: ConfigDocument, after: ConfigDocument) -> ConfigDiff:
    shared = sorted(before.targets.keys() & after.targets.keys(), key=lambda each: (each != STEP_TIME, each))
    moves = [
        _move(name, one, other)
        for name in shared
        for one in _portable(before, name)
        for other in _portable(after, name)
        if one.name == other.name
    ]
    step = _typical_step(before, after)
    has_moved = any(each.moved for each in moves if each.target == STEP_TIME) or (step is not None and step.is_other)
    term, added = _moved_term(before, after, step) if has_moved else ("", None)
    return ConfigDiff(before.config_id, after.config_id, tuple(moves), step, term, added)


def _portable(config: ConfigDocument, target: str) -> tuple[Coefficient, ...]:
    model = config.targets[target].models.get("portable")
    return model.coefficients if model is not None else ()


def _move(target: str, one: Coefficient, other: Coefficient) -> Move:
    distance = None
    if one.stderr is not None and other.stderr is not None and (one.stderr or other.stderr):
        errors = (one.stderr, one.form_error or 0.0, other.stderr, other.form_error or 0.0)
        distance = (other.value - one.value) / math.hypot(*errors)
    moved = distance is not None and abs(distance) > NOTABLE
    return Move(target, one.name, one.unit, one.value, other.value, distance, one.status, other.status, moved)


def _typical_step(before: ConfigDocument, after: ConfigDocument) -> TypicalStep | None:
    try:
        models = [StepModel(config, Limits()) for config in (before, after)]
    except NoCoefficientsError:
        return None
    means = {each.name: each.mean for each in models[0].model.coefficients}
    prefill, context, requests = (means.get(name) for name in FEATURES[1:])
    if prefill is None or context is None or requests is None:
        return None
    times = [model.coefficients.step_us(prefill, requests, context) for model in models]
    return TypicalStep(prefill, requests, context, times[0], times[1])


def _moved_term(before: ConfigDocument, after: ConfigDocument, step: TypicalStep | None) -> tuple[str, float | None]:
    """The one term that explains how the coefficients of the step time differ, and by how much it does."""
    one, other = (config.targets[STEP_TIME].models["portable"] for config in (before, after))
    names = [each.name for each in one.coefficients]
    every_error_known = all(each.stderr is not None for each in (*one.coefficients, *other.coefficients))
    if names != [each.name for each in other.coefficients] or not every_error_known:
        return "", None
    b = [each.value for each in one.coefficients]
    both = zip(one.error_covariance, other.error_covariance, strict=True)
    summed = [[x + y for x, y in zip(*rows, strict=True)] for rows in both]
    moved = [each.value - value for each, value in zip(other.coefficients, b, strict=True)]
    decode = [0.0 if name.startswith("prefill") else value for name, value in zip(names, b, strict=True)]
    hypotheses = {"all": b, "decode": decode}
    hypotheses |= {name: [float(name == other) for other in names] for name in names}
    weighted = _solved(summed, moved)
    if weighted is None:
        return "", None
    every = sum(map(mul, moved, weighted))
    lengths = {name: sum(map(mul, u, _solved(summed, u) or u)) for name, u in hypotheses.items()}
    found = {"": (every, 0.0)}
    for name, u in hypotheses.items():
        if lengths[name] > 0.0:
            by = sum(map(mul, u, weighted)) / lengths[name]
            found[name] = (every - by * by * lengths[name], by)
    (least, by), name = min((value, name) for name, value in found.items())
    enough = _TWICE * least + NOTABLE**2 + _QUIETEST**2 * lengths["all"]
    told = [each for each, (left, _) in found.items() if left <= enough]
    if len(told) > 1:
        of_decode = "decode" in told and not any(each in ("", "all") or each.startswith("prefill") for each in told)
        name, by = ("not_prefill", found["decode"][1]) if of_decode else ("", 0.0)
    is_sure = least <= _LEFT * every
    goes_along = step is None or not step.is_other or (by > 0.0) == (step.after_us > step.before_us)
    return (name, by) if is_sure and goes_along else ("", None)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The x of matrix x = right, by elimination; None where the matrix is singular. It is one of covariances."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(len(rows)):
        if not rows[i][i] > _SINGULAR * matrix[i][i]:
            return None
        for k in range(len(rows)):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
