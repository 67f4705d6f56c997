"""Which system the middle fifth chooses, judged by the last fifth, and which ones the protocol drops.

A system that is chosen by what it is judged on looks better than it is. What is scored is delivered after the cut; its
first half in time chooses, its second half judges. A system whose mean step error is above 30 % is dropped: it is said
of it, and it is not worth tuning. Reference: the protocol of docs/systems.md's sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from online import Floats, RowBlock

from .fits import ape

STEP_ERROR_MAX = 0.30


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen system with its mean step error where it was chosen and where it is judged; who is dropped."""

    system: str
    chosen_mape: float
    judged_mape: float
    best: str
    best_mape: float
    dropped: list[str]


def choice_of(predictions: Mapping[str, Floats], rows: RowBlock, cut_ns: int) -> Choice | None:
    """By predictions (n,) of each system for the scored rows; None where one of the halves has no rows."""
    early = rows.end_ns <= cut_ns + (rows.end_ns.max(initial=cut_ns) - cut_ns) // 2
    halves = []
    for mask in (early, ~early, np.ones(len(rows), np.bool_)):
        errors = {name: ape(each[mask], rows.elapsed_us[mask]) for name, each in predictions.items()}
        halves.append({name: float(error.mean()) for name, error in errors.items() if len(error)})
    chosen, judged, whole = halves
    both = [name for name in chosen if name in judged]
    if not both:
        return None
    system, best = min(both, key=chosen.__getitem__), min(both, key=judged.__getitem__)
    return Choice(
        system=system,
        chosen_mape=chosen[system],
        judged_mape=judged[system],
        best=best,
        best_mape=judged[best],
        dropped=[name for name, error in whole.items() if error > STEP_ERROR_MAX],
    )
