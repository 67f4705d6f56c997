"""Leave one out: how well what others learned predicts a configuration that taught nothing, or next to nothing.

For each capture, the donors are those of other configurations (``config``), models (``model``), GPUs (``gpu``),
quantizations (``quantization``) or just the other recordings (``workload``). The left-out capture's scored part is
predicted with nothing of its own (zero-shot), and after its first 20, 100 and 300 rows.

``portable`` is told by the data sheet and by the overheads that donors share, as live; the other systems start from
statistics pooled over donors. Variants of the sources run beside: HFD-TL with its base frozen, RECE by its specialists,
BSR-ARD by a bias and a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from collector.identity import IDENTITY, Fact
from online import Floats, Quality, Target
from online.features.systems import BSR_ARD, HFD_TL, PORTABLE, RECE, SYSTEMS, System
from online.rls import Prior
from online.transfer import (
    HIDES_HITS,
    Donor,
    DonorPool,
    bias_and_scale,
    donor_of,
    ensemble,
    frozen,
    pool,
    specialists,
)

from .captures import Capture
from .fits import ape, learn, predict

STEP = Target.STEP_TIME
FIRST_ROWS = (20, 100, 300)
_ARCHITECTURE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts")

ALL: tuple[System, ...] = (PORTABLE, *SYSTEMS)


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system on one left-out capture; mean step errors as ratios, None = cannot be said."""

    system: str
    variant: str
    donors: int
    zero_shot: float | None = None
    after: dict[str, float] = {}
    cold: dict[str, float] = {}


def group(capture: Capture, key: str) -> str:
    """What is left out together with this capture."""
    if key == "workload":
        return capture.name
    if key in ("gpu", "quantization"):
        return str(capture.facts.get(key, "none" if key == "quantization" else capture.name))
    names = (*(IDENTITY if key == "config" else ("model",)), *_ARCHITECTURE)
    known = {name: capture.facts[name] for name in names if name in capture.facts}
    return str(sorted(known.items())) if known else capture.name


def leave_one_out(captures: Sequence[Capture], key: str, tell: Callable[[str], None]) -> dict[str, list[Transfer]]:
    """By left-out capture; captures without step rows, or without any donor, are not there."""
    usable = [capture for capture in captures if STEP in capture.full and STEP in capture.learned]
    out: dict[str, list[Transfer]] = {}
    for system in ALL:
        donors = {capture.name: _donor(system, capture) for capture in usable}
        for capture in usable:
            tell(f"{capture.name} without itself: {system.name}")
            others = [
                donor
                for other in usable
                if group(other, key) != group(capture, key) and (donor := donors[other.name]) is not None
            ]
            if others and system.live(STEP, capture.facts) is not None:
                out.setdefault(capture.name, []).extend(_variants(system, capture, others))
    return out


def _donor(system: System, capture: Capture) -> Donor | None:
    features = system.live(STEP, capture.facts)
    if features is None:
        return None
    model = learn(features, capture.full[STEP].rows)
    return None if model is None else donor_of(capture.name, _facts_of(capture), model)


def _facts_of(capture: Capture) -> dict[str, Fact]:
    """With what its telemetry hides."""
    requests = bool((capture.full[STEP].rows.quality == Quality.REQUESTS).any())
    return {**capture.facts, HIDES_HITS: requests and capture.facts.get("enable_prefix_caching") is not False}


def _variants(system: System, capture: Capture, donors: Sequence[Donor]) -> list[Transfer]:
    if system is PORTABLE:
        return _by_sheet(capture, donors)
    facts: dict[str, Fact] = capture.facts
    pooled = pool(system, STEP, donors)
    prior = None if pooled is None else pooled.prior(facts)
    if prior is None:
        return []
    cold = _after(system, capture, None)
    found = [_transfer(system, "prior", capture, len(donors), prior, cold)]
    features = system.live(STEP, facts)
    if system is HFD_TL and features is not None:
        found.append(_transfer(system, "frozen", capture, len(donors), frozen(prior, features), cold))
    if system is RECE:
        clusters = specialists(system, STEP, donors)
        together = ensemble(facts, clusters)
        if together is not None:
            found.append(_transfer(system, f"{len(clusters)} specialists", capture, len(donors), together, cold))
    if system is BSR_ARD:
        found.append(_bias_and_scale(system, capture, len(donors), prior))
    return found


def _by_sheet(capture: Capture, donors: Sequence[Donor]) -> list[Transfer]:
    """``portable`` as a sidecar with these donors publishes it; nothing without a data sheet."""
    known, features, rows = DonorPool(len(donors)), PORTABLE.live(STEP, {}), capture.scored(STEP)
    known.add(donors)
    prior = known.sheet_prior("", _facts_of(capture))
    if prior is None or features is None or not len(rows):
        return []

    def error(beta: Floats) -> float:
        return float(ape(features.evaluate(rows) @ beta, rows.elapsed_us).mean())

    after, cold = {}, {}
    for count in FIRST_ROWS:
        model = learn(features, capture.learned[STEP].slice(0, min(count, len(capture.learned[STEP]))))
        if model is not None:
            own, told = model.fit.beta[: len(features)], prior.after(model)
            after[str(count)], cold[str(count)] = error(own if told is None else told.beta), error(own)
    zero = error(prior.before().beta)
    count = len(donors)
    return [Transfer(system="portable", variant="sheet", donors=count, zero_shot=zero, after=after, cold=cold)]


def _transfer(
    system: System, variant: str, capture: Capture, donors: int, prior: Prior, cold: dict[str, float]
) -> Transfer:
    rows, features = capture.scored(STEP), system.live(STEP, capture.facts)
    assert features is not None  # noqa: S101  the caller looked
    errors = ape(features.evaluate(rows) @ prior.mean[: len(features)], rows.elapsed_us)
    return Transfer(
        system=system.name,
        variant=variant,
        donors=donors,
        zero_shot=float(errors.mean()) if len(errors) else None,
        after=_after(system, capture, prior),
        cold=cold,
    )


def _after(system: System, capture: Capture, prior: Prior | None) -> dict[str, float]:
    rows, features = capture.scored(STEP), system.live(STEP, capture.facts)
    assert features is not None  # noqa: S101  the caller looked
    out = {}
    for count in FIRST_ROWS:
        head = capture.learned[STEP].slice(0, min(count, len(capture.learned[STEP])))
        model = learn(features, head, prior=prior)
        if model is not None:
            errors = ape(predict(model, features, rows), rows.elapsed_us)
            if len(errors):
                out[str(count)] = float(errors.mean())
    return out


def _bias_and_scale(system: System, capture: Capture, donors: int, prior: Prior) -> Transfer:
    rows, features = capture.scored(STEP), system.live(STEP, capture.facts)
    assert features is not None  # noqa: S101  the caller looked
    mean = prior.mean[: len(features)]
    out = {}
    for count in FIRST_ROWS:
        head = capture.learned[STEP].slice(0, min(count, len(capture.learned[STEP])))
        base = features.evaluate(head) @ mean
        known = np.isfinite(base)
        if not known.any():
            continue
        bias, scale = bias_and_scale(base[known], head.elapsed_us[known])
        errors = ape(bias * rows.steps + scale * (features.evaluate(rows) @ mean), rows.elapsed_us)
        if len(errors):
            out[str(count)] = float(errors.mean())
    return Transfer(system=system.name, variant="bias and scale", donors=donors, after=out)
