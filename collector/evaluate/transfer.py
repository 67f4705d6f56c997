"""Leave one out: how well what others learned predicts a configuration that taught nothing, or next to nothing.

For each capture, the donors are those of other models (``model``), or just the other recordings (``workload``). Its
scored part is predicted with nothing of its own (zero-shot), and after its first 20, 100 and 300 rows. ``portable``
starts from the data sheet and from the overheads that donors share, the other systems from statistics pooled over
donors, both as live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from collector.identity import Fact
from collector.service import hides_hits
from online import Floats, Quality, RowBlock, Target
from online.features import PORTABLE, SYSTEMS, FeatureSet, build
from online.rls import Prior
from online.transfer import HIDES_HITS, Donor, DonorPool, donor_of, pool

from .captures import Capture
from .systems import ape, learn, mean

STEP = Target.STEP_TIME
FIRST_ROWS = (20, 100, 300)
_ARCHITECTURE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts")

Start = Callable[[RowBlock], Floats | None]
"""From the first rows of a capture, or none, to coefficients (p,); None where they cannot be said."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system on one left-out capture; mean step errors as ratios, None = cannot be said."""

    system: str
    donors: int
    zero_shot: float | None = None
    after: dict[str, float] = {}
    cold: dict[str, float] = {}


def group(capture: Capture, key: str) -> str:
    """What is left out together with this capture."""
    if key == "workload":
        return capture.name
    known = {name: capture.facts[name] for name in ("model", *_ARCHITECTURE) if name in capture.facts}
    return str(sorted(known.items())) if known else capture.name


def leave_one_out(captures: Sequence[Capture], key: str, systems: Iterable[str]) -> dict[str, list[Transfer]]:
    """By left-out capture; captures without step rows, or without any donor, are not there."""
    usable = [capture for capture in captures if capture.learned(STEP)]
    out: dict[str, list[Transfer]] = {}
    for system in systems:
        donors = {capture.name: _donor(system, capture) for capture in usable}
        for capture in usable:
            apart = (other for other in usable if group(other, key) != group(capture, key))
            others = [donor for other in apart if (donor := donors[other.name]) is not None]
            features = build(system, STEP, capture.facts)
            if others and features is not None:
                transfer = _transfer(capture, features, others)
                out.setdefault(capture.name, []).extend([transfer] if transfer is not None else [])
    return {name: transfers for name, transfers in out.items() if transfers}


def _donor(system: str, capture: Capture) -> Donor | None:
    features = build(system, STEP, capture.facts)
    learner = None if features is None else learn(features, capture.all_rows(STEP))
    return None if learner is None else donor_of(capture.name, _facts_of(capture), learner)


def _facts_of(capture: Capture) -> dict[str, Fact]:
    """With what its telemetry hides."""
    qualities = map(Quality, set(capture.all_rows(STEP).quality.tolist()))
    return {**capture.facts, HIDES_HITS: any(hides_hits(each, capture.facts) for each in qualities)}


def _transfer(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> Transfer | None:
    """Score what the donors say, alone and after the first rows, beside a cold start; None if they say nothing."""
    rows, learned = capture.scored(STEP), capture.learned(STEP)
    start = _by_sheet(capture, features, donors) if features.name == PORTABLE else _pooled(capture, features, donors)
    if start is None or not len(rows):
        return None
    x = features.evaluate(rows)

    def errors(start: Start) -> dict[str, float]:
        betas = {str(n): start(learned.slice(0, min(n, len(learned)))) for n in (0, *FIRST_ROWS)}
        found = {n: mean(ape(x @ beta, rows.elapsed_us)) for n, beta in betas.items() if beta is not None}
        return {n: error for n, error in found.items() if error is not None}

    after, cold = errors(start), errors(_started(features, None))
    zero_shot = after.pop("0", None)
    return Transfer(system=features.name, donors=len(donors), zero_shot=zero_shot, after=after, cold=cold)


def _pooled(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> Start | None:
    """From the statistics of donors that were added; None if they say nothing."""
    pooled = pool(SYSTEMS[features.name], STEP, donors)
    prior = None if pooled is None else pooled.prior(capture.facts)
    return None if prior is None else _started(features, prior)


def _started(features: FeatureSet, prior: Prior | None) -> Start:
    """What the rows and a prior say."""

    def coefficients(head: RowBlock) -> Floats | None:
        if not head:
            return None if prior is None else prior.mean[: len(features)]
        learner = learn(features, head, prior)
        return None if learner is None else learner.fit.beta[: len(features)]

    return coefficients


def _by_sheet(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> Start | None:
    """As a sidecar with these donors publishes it; None without a data sheet."""
    sheet = DonorPool(donors).sheet_prior("", _facts_of(capture))
    if sheet is None:
        return None

    def coefficients(head: RowBlock) -> Floats | None:
        if not head:
            return sheet.before().beta
        learner = learn(features, head)
        found = None if learner is None else sheet.after(learner)
        return found.beta if found is not None else None if learner is None else learner.fit.beta[: len(features)]

    return coefficients
