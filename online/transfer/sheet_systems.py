"""What a data sheet says in the columns of physics and roofline, before a configuration has a row.

As ``portable`` is told (online/transfer/sheet_terms.py), with theta = (lay, ar, g, d, moe) and q; over = L (lay +
ar [tp > 1] + moe [experts]), W0 what every step reads of the weights, link, pair and kv as there:

    physics     intercept = W0 + over    hinge = q    t_kv = 1 + g pair / kv    t_pfattn = q / 0.62
                requests = link + d    t_experts = 1    has_prefill = t_tok = tokens_to_32 = 0
    roofline    intercept = over    compute = q / 0.62    memory = 1    communication = 2

Bandwidth terms are the sheet's. What a prefill costs beside its products nobody has told, so that is 0. Roofline has no
column for the products of decode attention: g is not in it. Its memory, and experts of mixtures, are 1 +- 0.25: at 80 %
of the bandwidth they would be 1.25.

    beta = base + M theta     se_j = sqrt (s_j^2 + (M S^2 M')_jj)

Reference: docs/systems.md, source 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from online.features import Column, Facts, build
from online.features.sheets import Sheet, sheet_of
from online.rows import Floats, Target
from online.snapshot import FeatureSnapshot, ModelSnapshot

_LAY, _AR, _G, _D, _MOE, _Q = np.eye(6)
_NOTHING = np.zeros(6)
_DIRECTIONS, _GEMM_EFFICIENCY, _BANDWIDTH_SD = 2.0, 0.62, 0.25


class _Term(NamedTuple):
    """Base, slope over theta and q (6,), and an error that is in neither."""

    base: float
    slope: Floats = _NOTHING
    sd: float = 0.0

    def told(self, column: Column, mean: Floats, sd: Floats) -> FeatureSnapshot:
        """A coefficient as published before a row, by theta and q and their errors, (6,) each."""
        value, variance = self.base + float(self.slope @ mean), self.sd**2 + float(self.slope**2 @ sd**2)
        stderr = math.sqrt(variance)
        return FeatureSnapshot(
            name=column.name, unit=column.unit, coefficient=value, status="prior_only", stderr=stderr
        )


def systems_told(facts: Facts, mean: Floats, sd: Floats) -> dict[str, ModelSnapshot]:
    """Of the systems that apply to a configuration, by theta and q and their errors, (6,) each."""
    sheet, _ = sheet_of(facts)
    told: dict[str, ModelSnapshot] = {}
    for name, terms_of_sheet in _BY_SHEET.items():
        columns = build(name, Target.STEP_TIME, facts)
        if sheet is not None and columns is not None:
            terms = terms_of_sheet(sheet)
            features = [terms.get(column.name, _Term(0.0)).told(column, mean, sd) for column in columns.columns]
            told[name] = ModelSnapshot(features=features, rows=0, effective_rows=0.0)
    return told


def _overheads(sheet: Sheet) -> Floats:
    layers = float(sheet.model.layers)
    return np.asarray(layers * (_LAY + _AR * (sheet.tp > 1) + _MOE * sheet.model.moe))


def _physics(sheet: Sheet) -> dict[str, _Term]:
    return {
        "intercept": _Term(sheet.dense_weight_us, _overheads(sheet)),
        "hinge": _Term(0.0, _Q),
        "t_kv": _Term(1.0, _G * sheet.pair_us / sheet.kv_token_us),
        "t_pfattn": _Term(0.0, _Q / _GEMM_EFFICIENCY),
        "requests": _Term(_DIRECTIONS * (sheet.all_reduce_us or 0.0), _D),
        "t_experts": _Term(1.0, sd=_BANDWIDTH_SD),
    }


def _roofline(sheet: Sheet) -> dict[str, _Term]:
    return {
        "intercept": _Term(0.0, _overheads(sheet)),
        "compute": _Term(0.0, _Q / _GEMM_EFFICIENCY),
        "memory": _Term(1.0, sd=_BANDWIDTH_SD),
        "communication": _Term(_DIRECTIONS),
    }


_BY_SHEET = {"physics": _physics, "roofline": _roofline}
