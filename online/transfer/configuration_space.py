"""What to start from and what to measure next: the configuration space of RECE.

    v(c) = (d/4096, L/32, Hkv/H, moe, E/8, F/1e15, B/3e12, memory/80, Nb/8192, Ns/256, 1/tp, chunked, prefix, offload)
    similarity(c, s) = cos(v_c, v_s)          weight_s = softmax over specialists of similarity / 0.5
    coverage(c)      = min over seen s of |v_c - v_s|_2 / sqrt(14)          0 = measured already

A specialist is a cluster of configurations whose statistics are pooled (:mod:`online.transfer`); its centre is the mean
of their vectors. A prediction is the weighted mean of the heaviest specialists; as each is linear in the coefficients,
their mean is one coefficient vector, computed once per configuration and not once per step.

Which configuration to measure next is greedy farthest point: what lies farthest from everything measured; at most twice
as far from optimal as any choice (Gonzalez, Theor. Comput. Sci. 1985). Reference: docs/systems.md, source 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from online.constants import TINY
from online.features import Facts
from online.features.sheets import sheet_of
from online.features.systems import System
from online.rls import Prior
from online.rows import Floats, Target

from .pooled import Donor, Pooled, pool

# Guess.
TEMPERATURE = 0.5
# Guess: few specialists are like any one configuration.
HEAVIEST = 3
# Guess.
CLUSTER_RADIUS = 0.2
"""Configurations at most this far from a centre share its specialist."""


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


def similarity(a: Floats, b: Floats) -> float:
    """Cosine of the angle between two configurations."""
    return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), TINY))


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


@dataclass(frozen=True, slots=True)
class Specialist:
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
    close = np.array([similarity(v, s.centre) for s in known]) / TEMPERATURE
    weight = np.exp(close - close.max())
    weight[np.argsort(-weight)[HEAVIEST:]] = 0.0
    return np.asarray(weight / weight.sum())


def ensemble(facts: Facts, known: Sequence[Specialist]) -> Prior | None:
    """The weighted specialists as one coefficient vector and its spread; None where none applies."""
    share = specialist_weights(facts, known)
    priors = [(w, s.pooled.prior(facts)) for w, s in zip(share, known, strict=True) if w > 0.0]
    usable = [(w, p) for w, p in priors if p is not None]
    total = sum(w for w, _ in usable)
    if not usable or total <= 0.0:
        return None
    mean = np.asarray(sum((w / total * p.mean for w, p in usable), np.zeros_like(usable[0][1].mean)))
    apart = np.sqrt(sum((w / total * (p.mean - mean) ** 2 for w, p in usable), np.zeros_like(mean)))
    sd = np.min([p.sd for _, p in usable], axis=0)
    return Prior(mean, np.maximum(sd, apart), usable[0][1].misfit)
