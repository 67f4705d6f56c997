"""``tracefit lab donors``: what saved states know together, how far it reaches, and what to measure next.

States are pooled exactly (:mod:`online.transfer`): their statistics are added, nothing is averaged. Coverage is the
distance of a configuration to the nearest one measured; the candidates are the models seen on every GPU of the sheets,
on as many of them as hold the weights, farthest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from collector.config import Config
from collector.identity import shipped_sheets
from collector.runtime import EXIT_FAILED, EXIT_OK, note, say
from collector.service import state_files
from exporters.questions import as_json
from online import Bank, Floats, StateError, Target
from online.features import PORTABLE, SYSTEMS, Facts
from online.features.sheets import SheetError, architecture, model_sheet
from online.state import LineageLedger
from online.transfer import Donor, pool

from .command import tabulate
from .transfer import configuration_vector, coverage, measure_next

STATE_BYTES_MAX = 256 * 2**20
NEXT = 5
GPUS = (1, 2, 4, 8)
WEIGHTS_SHARE = 0.8
"""Of a GPU's memory, what weights may take; the rest is KV cache and activations."""

_SHOWN = ("model", "gpu", "tensor_parallel_size", "dtype", "max_num_seqs", "max_num_batched_tokens")


def compare_donors(paths: Sequence[Path], *, as_document: bool) -> int:
    """Pool the states under the paths and report; failed if no state could be used."""
    found = read_states(paths, Bank(Config(feature_sets=(PORTABLE, *SYSTEMS), learners=("rls",))))
    if not found:
        note("no donor among them")
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


def read_states(paths: Sequence[Path], bank: Bank) -> dict[str, tuple[Facts, list[Donor]]]:
    """Facts and statistics by configuration; states of one configuration are merged.

    Files that are unusable, or whose rows another one has already, are noted and left out.
    """
    ledger = LineageLedger()
    for path in chain.from_iterable(map(state_files, paths)):
        try:
            if path.stat().st_size > STATE_BYTES_MAX:
                raise StateError(f"larger than {STATE_BYTES_MAX >> 20} MiB")
            one = Bank(bank.settings)
            one.restore(path.read_bytes())
            ledger.admit(str(path), one.lineages)
        except OSError as error:
            note(f"{path}: cannot be read: {error.strerror}")
        except StateError as error:
            note(f"{path}: {error}")
        else:
            bank.merge(one)
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
    """Configurations farthest from everything measured; empty if that cannot be said."""
    candidates = dict(_possible(seen)) if measured else {}
    return [{"configuration": name, "coverage": far} for name, far in measure_next(candidates, measured, NEXT)]


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
