"""``tracefit lab donors``: what saved states know together, how far it reaches, and what to measure next.

States are pooled exactly (:mod:`online.transfer`): their statistics are added, nothing is averaged. The candidates to
measure next are the models seen on every GPU of the sheets, on as many of them as hold the weights. How far one is from
everything measured is a distance in the space of RECE (docs/systems.md):

    v(c) = (d/4096, L/32, Hkv/H, moe, E/8, F/1e15, B/3e12, memory/80, Nb/8192, Ns/256, 1/tp, chunked, prefix, offload)
    coverage(c) = min over seen s of |v_c - v_s|_2 / sqrt(14)          0 = measured already

The farthest comes first, again and again: at most twice as far from optimal as any choice (Gonzalez, Theor. Comput.
Sci. 1985).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from collector.config import Config
from collector.fleet.pull import Examined, add, choose, examine
from collector.identity import shipped_sheets
from collector.runtime import EXIT_FAILED, EXIT_OK, note, say
from collector.service import state_files
from exporters.questions import as_json
from exporters.status_page import FleetSource
from online import Floats, StateError, Target
from online.features import PORTABLE, SYSTEMS, Facts
from online.features.sheets import SheetError, architecture, model_sheet, sheet_of
from online.transfer import Donor, pool

from .command import tabulate

NEXT = 5
GPUS = (1, 2, 4, 8)
WEIGHTS_SHARE = 0.8
"""Of a GPU's memory, what weights may take; the rest is KV cache and activations."""

_SHOWN = ("model", "gpu", "tensor_parallel_size", "dtype", "max_num_seqs", "max_num_batched_tokens")


def compare_donors(paths: Sequence[Path], *, as_document: bool) -> int:
    """Pool the states under the paths and report; failed if no state could be used."""
    try:
        found = read_states(paths, Config(feature_sets=(PORTABLE, *SYSTEMS), learners=("rls",)))
    except StateError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if not found:
        note("error: no donor among them")
        return EXIT_FAILED
    vectors = {config_id: configuration_vector(facts) for config_id, (facts, _) in found.items()}
    points = {config_id: point for config_id, point in vectors.items() if point is not None}
    document: dict[str, Any] = {
        "donors": [_donor(config_id, *known, points) for config_id, known in found.items()],
        "pooled": dict(_pooled([donor for _, donors in found.values() for donor in donors])),
        "measure_next": _farthest({config_id: facts for config_id, (facts, _) in found.items()}, list(points.values())),
    }
    for line in [as_json(document)] if as_document else _report(**document):
        say(line)
    return EXIT_OK


def read_states(paths: Sequence[Path], config: Config) -> dict[str, tuple[Facts, list[Donor]]]:
    """Facts and statistics by configuration; states of one configuration are merged.

    Files that are unusable, or whose rows a newer one has already, are noted and left out; StateError if two of one
    configuration do not fit each other.
    """
    found = [examine(str(path), path, config) for path in chain.from_iterable(map(state_files, paths))]
    chosen, refused = choose([each for each in found if isinstance(each, Examined)])
    for each in (*(each for each in found if isinstance(each, FleetSource)), *refused):
        note(f"{each.name}: {each.detail}")
    bank = add(chosen, config)
    return {config_id: (bank.facts(config_id), bank.statistics(config_id)) for config_id in sorted(bank.configs())}


def _donor(config_id: str, facts: Facts, donors: Sequence[Donor], points: Mapping[str, Floats]) -> dict[str, Any]:
    """A configuration, its rows, and how far the nearest other one is; None without a sheet, or without another."""
    others = [point for other, point in points.items() if other != config_id]
    return {
        "config_id": config_id,
        "facts": {name: facts[name] for name in _SHOWN if name in facts},
        "rows": max((donor.rows for donor in donors if donor.features.target is Target.STEP_TIME), default=0.0),
        "has_sheet": config_id in points,
        "nearest_other": coverage(points[config_id], others) if config_id in points and others else None,
    }


def _pooled(donors: Sequence[Donor]) -> Iterator[tuple[str, dict[str, Any]]]:
    """By system: how many donors it has, and the coefficients of the step time that they say together."""
    for name, system in SYSTEMS.items():
        same = [d for d in donors if d.features.name == name and d.features.target is Target.STEP_TIME]
        if (pooled := pool(system, Target.STEP_TIME, same)) is not None:
            known = {each: float(value) for each, value in zip(pooled.names, pooled.gamma, strict=True) if value > 0.0}
            yield name, {"donors": len(pooled.donors), "coefficients": known}


def _farthest(seen: Mapping[str, Facts], measured: Sequence[Floats]) -> list[dict[str, Any]]:
    """What to measure next, and its coverage when its turn comes; empty if that cannot be said."""
    left, known = dict(_possible(seen)) if measured else {}, list(measured)
    chosen: list[dict[str, Any]] = []
    while left and len(chosen) < NEXT:
        far = {name: coverage(point, known) for name, point in left.items()}
        name = max(sorted(far), key=far.__getitem__)
        chosen.append({"configuration": name, "coverage": far[name]})
        known.append(left.pop(name))
    return chosen


def _possible(seen: Mapping[str, Facts]) -> Iterator[tuple[str, Floats]]:
    """Configurations one could measure: the models seen, on every GPU whose memory holds the weights."""
    for config_id, facts in seen.items():
        try:
            model, _ = model_sheet(architecture(facts))
        except SheetError:
            continue
        if model is None:
            continue
        for sheet, gpus in product(shipped_sheets().values(), GPUS):
            fits = model.weight_bytes <= gpus * sheet.memory_gb * 1e9 * WEIGHTS_SHARE
            changed = {**facts, **sheet.facts("auto"), "gpu": sheet.name, "tensor_parallel_size": gpus}
            if fits and model.kv_heads % min(gpus, model.kv_heads) == 0:
                point = configuration_vector(changed)
                if point is not None:
                    yield f"{facts.get('model', config_id)} on {gpus} x {sheet.name}", point


def _report(
    donors: list[dict[str, Any]], pooled: dict[str, dict[str, Any]], measure_next: list[dict[str, Any]]
) -> Iterator[str]:
    """The same for eyes."""
    table = []
    for donor in donors:
        near = donor["nearest_other"]
        described = {name: str(donor["facts"].get(name, "-")) for name in _SHOWN}
        distance = "no sheet" if not donor["has_sheet"] else "-" if near is None else f"{near:.2f}"
        table.append(
            {"donor": donor["config_id"], **described, "rows": f"{donor['rows']:.0f}", "nearest other": distance}
        )
    yield "Donors"
    yield from tabulate(table)
    for name, together in pooled.items():
        yield ""
        yield f"{name}: {together['donors']} donors pooled"
        coefficients = together["coefficients"].items()
        yield from tabulate([{"coefficient": each, "value": f"{value:.4g}"} for each, value in coefficients])
    yield ""
    if not measure_next:
        yield "What to measure next cannot be said: no donor has a model file and a known GPU"
        return
    yield "Measure next (farthest from everything measured)"
    yield from tabulate([{**each, "coverage": f"{each['coverage']:.2f}"} for each in measure_next])


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
    """Distance to the nearest of the configurations measured, of which there is one at least."""
    return min(float(np.linalg.norm(candidate - each)) for each in measured) / math.sqrt(len(candidate))
