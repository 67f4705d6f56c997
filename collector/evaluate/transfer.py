"""Leave one out: how well what others learned predicts a configuration that taught nothing, or next to nothing.

For each capture, the donors are those of other configurations (``config``), models (``model``), GPUs (``gpu``),
quantizations (``quantization``) or just the other recordings (``workload``). Its scored part is predicted with nothing
of its own (zero-shot), and after its first 20, 100 and 300 rows. ``portable`` is told by the data sheet and by the
overheads that donors share, the other systems start from statistics pooled over donors, both as live. Beside them run
three variants of the sources:

    hfd_tl    stage 2 as written: base and configuration stay at the donors', only the residual is learned
    bsr_ard   y = bias + scale yhat, both >= 0, least relative squares over the first rows
    rece      specialists: clusters of donors, each pooled, weighed by how alike they are to the configuration

    v(c) = (d/4096, L/32, Hkv/H, moe, E/8, F/1e15, B/3e12, memory/80, Nb/8192, Ns/256, 1/tp, chunked, prefix, offload)
    similarity(c, s) = cos(v_c, v_s)          weight_s = softmax over specialists of similarity / 0.5
    coverage(c)      = min over seen s of |v_c - v_s|_2 / sqrt(14)          0 = measured already

The prediction of the specialists is the weighted mean of the three heaviest. Which configuration to measure next is
greedy farthest point: what lies farthest from everything measured; at most twice as far from optimal as any choice
(Gonzalez, Theor. Comput. Sci. 1985). References: docs/systems.md, sources 5 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from collector.identity import IDENTITY, Fact
from collector.runtime import PrintLine
from online import Floats, Quality, RowBlock, Target
from online.features import INTERCEPT, PORTABLE, SYSTEMS, Facts, FeatureSet, System, build
from online.features.sheets import sheet_of
from online.rls import Prior, solve
from online.transfer import HIDES_HITS, Donor, DonorPool, Pooled, donor_of, pool

from .captures import Capture
from .systems import ape, learn, mean

STEP = Target.STEP_TIME
FIRST_ROWS = (20, 100, 300)
_ARCHITECTURE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts")

RESIDUAL = frozenset({INTERCEPT, "usage_squared", "queue_squared"})
"""Columns of HFD-TL's stage 2."""
# Guard: stands for 0.
FROZEN_SD = 1e-6
"""Relative standard deviation of a frozen coefficient: no data moves it by more than about as much."""
# Guess: of the softmax; few specialists are like any one configuration; configurations that share one lie so near.
TEMPERATURE, HEAVIEST, CLUSTER_RADIUS = 0.5, 3, 0.2

Variant = Callable[[RowBlock], Floats | None]
"""From the first rows of a capture, or none, to coefficients (p,); None where they cannot be said."""


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


def leave_one_out(captures: Sequence[Capture], key: str, tell: PrintLine) -> dict[str, list[Transfer]]:
    """By left-out capture; captures without step rows, or without any donor, are not there."""
    usable = [capture for capture in captures if STEP in capture.full and STEP in capture.learned]
    out: dict[str, list[Transfer]] = {}
    for system in (PORTABLE, *SYSTEMS):
        donors = {capture.name: _donor(system, capture) for capture in usable}
        for capture in usable:
            tell(f"{capture.name} without itself: {system}")
            apart = (other for other in usable if group(other, key) != group(capture, key))
            others = [donor for other in apart if (donor := donors[other.name]) is not None]
            features = build(system, STEP, capture.facts)
            if others and features is not None:
                out.setdefault(capture.name, []).extend(_transfers(capture, features, others))
    return {name: transfers for name, transfers in out.items() if transfers}


def _donor(system: str, capture: Capture) -> Donor | None:
    features = build(system, STEP, capture.facts)
    learner = None if features is None else learn(features, capture.full[STEP].rows)
    return None if learner is None else donor_of(capture.name, _facts_of(capture), learner)


def _facts_of(capture: Capture) -> dict[str, Fact]:
    """With what its telemetry hides."""
    requests = bool((capture.full[STEP].rows.quality == Quality.REQUESTS).any())
    return {**capture.facts, HIDES_HITS: requests and capture.facts.get("enable_prefix_caching") is not False}


def _transfers(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> list[Transfer]:
    """Score each variant without own rows and after the first ones, beside a cold start."""
    rows, learned = capture.scored(STEP), capture.learned[STEP]
    x = features.evaluate(rows)

    def errors(variant: Variant) -> dict[str, float]:
        betas = {str(n): variant(learned.slice(0, min(n, len(learned)))) for n in (0, *FIRST_ROWS)}
        found = {n: mean(ape(x @ beta, rows.elapsed_us)) for n, beta in betas.items() if beta is not None}
        return {n: error for n, error in found.items() if error is not None}

    out, cold = [], errors(_started(features, None))
    for name, variant in (_variants(capture, features, donors) if len(rows) else {}).items():
        after = errors(variant)
        out.append(
            Transfer(
                system=features.name,
                variant=name,
                donors=len(donors),
                zero_shot=after.pop("0", None),
                after=after,
                cold=cold,
            )
        )
    return out


def _variants(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> dict[str, Variant]:
    """What the donors of a system say together, by variant; empty if they say nothing."""
    if features.name == PORTABLE:
        return _by_sheet(capture, features, donors)
    system, facts = SYSTEMS[features.name], capture.facts
    pooled = pool(system, STEP, donors)
    prior = None if pooled is None else pooled.prior(facts)
    if prior is None:
        return {}
    variants = {"prior": _started(features, prior)}
    if system.name == "hfd_tl":
        variants["frozen"] = _started(features, frozen(prior, features))
    if system.name == "bsr_ard":
        variants["bias and scale"] = lambda head: _corrected(features, prior, head)
    if system.name == "rece":
        clusters = specialists(system, STEP, donors)
        together = ensemble(facts, clusters)
        if together is not None:
            variants[f"{len(clusters)} specialists"] = _started(features, together)
    return variants


def _started(features: FeatureSet, prior: Prior | None) -> Variant:
    """What the rows and a prior say."""

    def coefficients(head: RowBlock) -> Floats | None:
        if not head:
            return None if prior is None else prior.mean[: len(features)]
        learner = learn(features, head, prior)
        return None if learner is None else learner.fit.beta[: len(features)]

    return coefficients


def _by_sheet(capture: Capture, features: FeatureSet, donors: Sequence[Donor]) -> dict[str, Variant]:
    """As a sidecar with these donors publishes it; nothing without a data sheet."""
    sheet = DonorPool(donors).sheet_prior("", _facts_of(capture))
    if sheet is None:
        return {}

    def coefficients(head: RowBlock) -> Floats | None:
        if not head:
            return sheet.before().beta
        learner = learn(features, head)
        found = None if learner is None else sheet.after(learner)
        return found.beta if found is not None else None if learner is None else learner.fit.beta[: len(features)]

    return {"sheet": coefficients}


def frozen(prior: Prior, features: FeatureSet) -> Prior:
    """HFD-TL's stage 2 as written: base and configuration stay until rows contradict them, the residual is free."""
    sd = np.full(len(prior.sd), np.inf)
    for j, name in enumerate(features.names):
        if name not in RESIDUAL:
            sd[j] = FROZEN_SD * max(float(prior.mean[j]), 1e-12)
    return Prior(prior.mean, sd)


def _corrected(features: FeatureSet, prior: Prior, head: RowBlock) -> Floats | None:
    """A prior, with the bias and the scale of the first rows."""
    beta = prior.mean[: len(features)].copy()
    base = features.evaluate(head) @ beta
    known = np.isfinite(base)
    if not known.any():
        return None
    bias, scale = bias_and_scale(base[known], head.elapsed_us[known])
    beta *= scale
    beta[features.names.index(INTERCEPT)] += bias
    return beta


def bias_and_scale(prediction_us: Floats, elapsed_us: Floats) -> tuple[float, float]:
    """BSR-ARD's transfer over rows (n,)."""
    x = np.stack([np.ones_like(prediction_us), prediction_us], axis=1) / elapsed_us[:, None]
    none = np.zeros(2, np.bool_)
    bias, scale = solve(x.T @ x, x.sum(axis=0), none, ~none).beta
    return float(bias), float(scale)


# ------------------------------------------------------ the configuration space of RECE


def configuration_vector(facts: Facts) -> Floats | None:
    """The configuration as a point, shape (14,); None without the sheets."""
    sheet, _ = sheet_of(facts)
    if sheet is None:
        return None
    model = sheet.model
    return np.array(
        [
            model.hidden / 4096,
            model.layers / 32,
            model.kv_heads / model.heads,
            float(model.moe),
            model.experts / 8,
            sheet.flops_per_us * 1e6 / 1e15,
            sheet.bytes_per_us * 1e6 / 3e12,
            (sheet.memory_gb or 80.0) / 80,
            (sheet.max_batched_tokens or 8192.0) / 8192,
            (sheet.max_seqs or 256.0) / 256,
            1.0 / sheet.tp,
            float(sheet.chunked),
            float(sheet.prefix),
            float(sheet.offload),
        ]
    )


def coverage(candidate: Floats, measured: Sequence[Floats]) -> float:
    """Distance to the nearest configuration seen; infinite when none was."""
    return min((float(np.linalg.norm(candidate - s)) / np.sqrt(len(candidate)) for s in measured), default=float("inf"))


def measure_next(candidates: Mapping[str, Floats], measured: Sequence[Floats], count: int) -> list[tuple[str, float]]:
    """The ``count`` candidates to measure, farthest first, with their coverage when their turn comes."""
    left, known = dict(candidates), list(measured)
    out: list[tuple[str, float]] = []
    while left and len(out) < count:
        scores = {name: coverage(v, known) for name, v in left.items()}
        name = max(sorted(scores), key=scores.__getitem__)
        out.append((name, scores[name]))
        known.append(left.pop(name))
    return out


class Specialist(NamedTuple):
    """A cluster of donors: its centre (14,) and what they know together."""

    centre: Floats
    pooled: Pooled


def specialists(system: System, target: Target, donors: Sequence[Donor]) -> list[Specialist]:
    """Clusters of donors by greedy covering in the order given, each pooled."""
    clusters: list[tuple[list[Floats], list[Donor]]] = []
    for donor in donors:
        v = configuration_vector(donor.facts)
        if v is None:
            continue
        near = [(coverage(v, [np.mean(points, axis=0)]), points, members) for points, members in clusters]
        best = min(near, key=lambda item: item[0], default=None)
        if best is not None and best[0] <= CLUSTER_RADIUS:
            best[1].append(v)
            best[2].append(donor)
        else:
            clusters.append(([v], [donor]))
    pooled_clusters = [(np.mean(points, axis=0), pool(system, target, members)) for points, members in clusters]
    return [Specialist(centre, pooled) for centre, pooled in pooled_clusters if pooled is not None]


def specialist_weights(facts: Facts, known: Sequence[Specialist]) -> Floats:
    """Softmax weights of the heaviest specialists for a configuration, shape (len(known),); the others 0."""
    v = configuration_vector(facts)
    if v is None or not known:
        return np.zeros(len(known))
    centres = np.array([specialist.centre for specialist in known])
    alike = centres @ v / (np.linalg.norm(centres, axis=1) * np.linalg.norm(v)) / TEMPERATURE
    weight = np.exp(alike - alike.max())
    weight[np.argsort(-weight)[HEAVIEST:]] = 0.0
    return np.asarray(weight / weight.sum())


def ensemble(facts: Facts, known: Sequence[Specialist]) -> Prior | None:
    """The weighted specialists as one coefficient vector and its spread; None where none applies."""
    weights = specialist_weights(facts, known).tolist()
    priors = [(w, s.pooled.prior(facts)) for w, s in zip(weights, known, strict=True) if w > 0.0]
    usable = [(w, p) for w, p in priors if p is not None]
    if not usable:
        return None
    share = np.array([w for w, _ in usable])
    means, sd = (np.array([getattr(p, name) for _, p in usable]) for name in ("mean", "sd"))
    mean = share @ means / share.sum()
    apart = np.sqrt(share @ (means - mean) ** 2 / share.sum())
    return Prior(mean, np.maximum(sd.min(axis=0), apart), usable[0][1].misfit)
