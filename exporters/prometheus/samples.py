"""Samples of a page before rendering: what is no number, or comes twice, is withheld; so is what does not fit."""

from __future__ import annotations

import math
from typing import NamedTuple

from prometheus_client.samples import Exemplar

from exporters.prometheus.families import FAMILIES


class Sample(NamedTuple):
    """One series of a family before rendering; a ``suffix`` that has a label of its own has its value last."""

    labels: tuple[str, ...]
    value: float
    exemplar: Exemplar | None = None
    suffix: str = ""


Samples = dict[str, list[Sample]]
"""By family."""


def fit_samples(merged: Samples, max_series: int) -> int:
    """Empty the least important families, then shorten the rest, until they fit; returns what is left."""
    shown = sum(map(len, merged.values()))
    for family in reversed(FAMILIES[2:]):
        if shown <= max_series:
            return shown
        shown -= len(merged[family.name])
        merged[family.name] = []
    if shown > max_series:  # even what and how much does not fit: as many configurations as do, in snapshot order
        info, coefficients = (merged[family.name] for family in FAMILIES[:2])
        room = max_series
        kept: set[str] = set()
        counts: dict[str, int] = {}
        for sample in coefficients:
            counts[sample.labels[0]] = counts.get(sample.labels[0], 0) + 1
        for sample in info:
            need = 1 + counts.get(sample.labels[0], 0)
            if need > room:
                break
            room -= need
            kept.add(sample.labels[0])
        info[:] = [sample for sample in info if sample.labels[0] in kept]
        coefficients[:] = [sample for sample in coefficients if sample.labels[0] in kept]
        shown = len(info) + len(coefficients)
    return shown


def drop_non_finite(samples: Samples) -> int:
    """Absent beats wrong: a value that is not finite never leaves; returns how many there were."""
    dropped = 0
    for name, rows in samples.items():
        finite = [sample for sample in rows if math.isfinite(sample.value)]
        dropped += len(rows) - len(finite)
        samples[name] = finite
    return dropped


def drop_repeated(merged: Samples) -> int:
    """One value per series, the first: names that differ only in what a label cannot hold would give two."""
    dropped = 0
    for name, rows in merged.items():
        unique: dict[tuple[str, tuple[str, ...]], Sample] = {}
        for sample in rows:
            unique.setdefault((sample.suffix, sample.labels), sample)
        dropped += len(rows) - len(unique)
        merged[name] = list(unique.values())
    return dropped
