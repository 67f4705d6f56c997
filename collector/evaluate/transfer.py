"""Leave one out: how well what others learned predicts a configuration that taught nothing, or next to nothing.

For each capture, the donors are those of other models (``model``), or just the other recordings (``workload``). Its
scored part is predicted with nothing of its own (zero-shot), and after its first 20, 100 and 300 rows, by what a
sidecar with these donors publishes, and by what one without donors does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from collector.config import Config
from collector.service import hides_hits
from online import Bank, Floats, Quality, RowBlock, Target
from online.features import FeatureSet, build
from online.transfer import HIDES_HITS, Donor

from .captures import Capture
from .systems import Score, ape, mean

STEP = Target.STEP_TIME
FIRST_ROWS = (20, 100, 300)
_ARCHITECTURE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts")


def group(capture: Capture, key: str) -> str:
    """What is left out together with this capture."""
    if key == "workload":
        return capture.name
    known = {name: capture.facts[name] for name in ("model", *_ARCHITECTURE) if name in capture.facts}
    return str(sorted(known.items())) if known else capture.name


def leave_one_out(captures: Sequence[Capture], key: str, systems: Iterable[str]) -> dict[str, list[Score]]:
    """By left-out capture; captures without step rows, or without any donor, are not there."""
    usable = [capture for capture in captures if capture.learned(STEP)]
    out: dict[str, list[Score]] = {}
    for system in systems:
        donors = {
            capture.name: _learned(system, capture, capture.all_rows(STEP)).statistics(capture.name)
            for capture in usable
        }
        for capture in usable:
            apart = (other for other in usable if group(other, key) != group(capture, key))
            others = [donor for other in apart for donor in donors[other.name]]
            features = build(system, STEP, capture.facts)
            if others and features is not None and len(capture.scored(STEP)):
                out.setdefault(capture.name, []).append(_transfer(capture, features, others))
    return out


def _learned(system: str, capture: Capture, rows: RowBlock, donors: Sequence[Donor] = ()) -> Bank:
    """A bank with these donors that has learned rows of a capture by one system."""
    bank, qualities = Bank(Config(learners=("rls",), feature_sets=(system,))), map(Quality, set(rows.quality.tolist()))
    bank.pool.add(donors)
    # With what its telemetry hides.
    bank.describe(
        capture.name, {**capture.facts, HIDES_HITS: any(hides_hits(each, capture.facts) for each in qualities)}
    )
    bank.learn(capture.name, STEP, rows)
    return bank


def _transfer(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> Score:
    """Mean step errors of what is published with these donors, alone and after the first rows, and without them."""
    rows, learned = capture.scored(STEP), capture.learned(STEP)
    x = features.evaluate(rows)

    def error(n: int, lent: Sequence[Donor]) -> float | None:
        bank = _learned(features.name, capture, learned.slice(0, min(n, len(learned))), lent)
        beta = _published(bank, capture.name, features)
        return None if beta is None else mean(ape(x @ beta, rows.elapsed_us))

    return {
        "system": features.name,
        "donors": len(donors),
        "zero_shot": error(0, donors),
        "after": {str(n): error(n, donors) for n in FIRST_ROWS},
        "cold": {str(n): error(n, ()) for n in FIRST_ROWS},
    }


def _published(bank: Bank, name: str, features: FeatureSet) -> Floats | None:
    """Coefficients (p,) of a configuration, or its prior before there are any; None without both."""
    target = bank.targets(name).get(STEP.value)
    model = None if target is None else target.models.get(features.name)
    if model is None:
        prior = bank.pool.prior(features.name, STEP, bank.facts(name))
        return None if prior is None else prior.mean[: len(features)]
    told = {feature.name: feature.coefficient for feature in model.features}
    return np.array([told.get(each, 0.0) for each in features.names])
