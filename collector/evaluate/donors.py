"""``tracefit lab donors``: what saved states know together, how far it reaches, and what to measure next.

States are pooled exactly (:mod:`online.transfer`): their statistics are added, nothing is averaged. Coverage is the
distance of a configuration to the nearest one measured; the candidates are the models seen on every GPU of the sheets,
on as many of them as hold the weights, farthest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from collector.config import Config
from collector.identity import Fact, shipped_sheets
from collector.runtime import EXIT_FAILED, EXIT_OK, note, say
from exporters.questions import as_json
from online import Bank, StateError, Target
from online.features import PORTABLE, SYSTEMS, Facts
from online.features.sheets import HardwareSheet, SheetError, architecture, model_sheet
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
    """Pool the states under the paths and report.

    Args:
        paths: state files, or directories that hold some (``*.bin``).
        as_document: report one JSON document instead of tables.

    Returns:
        Exit code: failed if no state could be used.
    """
    bank = Bank(Config(feature_sets=(PORTABLE, *SYSTEMS), learners=("rls",)))
    found = read_states(paths, bank)
    if not found:
        note("no donor among them")
        return EXIT_FAILED
    donors, pooled = list(_donors(found)), dict(_pooled(found))
    farthest = _measure_next({config_id: facts for config_id, (facts, _) in found.items()})
    document = as_json({"donors": donors, "pooled": pooled, "measure_next": farthest})
    for line in [document] if as_document else _report(donors, pooled, farthest):
        say(line)
    return EXIT_OK


def read_states(paths: Sequence[Path], bank: Bank) -> dict[str, tuple[Facts, list[Donor]]]:
    """Facts and statistics by configuration; states of one configuration are merged.

    Files that are unusable, or whose rows another one has already, are noted and left out.
    """
    ledger = LineageLedger()
    for path in _files(paths):
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


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*.bin") if p.is_file())
        else:
            yield path


def _donors(found: dict[str, tuple[Facts, list[Donor]]]) -> Iterator[dict[str, Any]]:
    """Each configuration, its rows, and how far the nearest other one is; None without a sheet, or without another."""
    vectors = {config_id: configuration_vector(facts) for config_id, (facts, _) in found.items()}
    for config_id, (facts, donors) in found.items():
        mine = vectors[config_id]
        others = [v for other, v in vectors.items() if other != config_id and v is not None]
        yield {
            "config_id": config_id,
            "facts": {name: facts[name] for name in _SHOWN if name in facts},
            "rows": max((d.rows for d in donors if d.features.target is Target.STEP_TIME), default=0.0),
            "has_sheet": mine is not None,
            "nearest_other": coverage(mine, others) if mine is not None and others else None,
        }


def _pooled(found: dict[str, tuple[Facts, list[Donor]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """By system: how many donors it has, and the coefficients that they say together."""
    donors = [d for _, many in found.values() for d in many if d.features.target is Target.STEP_TIME]
    for name, system in SYSTEMS.items():
        pooled = pool(system, Target.STEP_TIME, [d for d in donors if d.features.name == name])
        if pooled is None:
            continue
        known = {each: float(value) for each, value in zip(pooled.names, pooled.gamma, strict=True) if value > 0.0}
        yield name, {"donors": len(pooled.donors), "coefficients": known}


def _measure_next(seen: dict[str, Facts]) -> list[dict[str, Any]]:
    """Configurations farthest from everything measured; empty if that cannot be said."""
    known = [v for facts in seen.values() if (v := configuration_vector(facts)) is not None]
    candidates = {
        name: v for name, facts in possible(seen, shipped_sheets()) if (v := configuration_vector(facts)) is not None
    }
    if not known or not candidates:
        return []
    found = measure_next(candidates, known, NEXT)
    return [{"configuration": name, "coverage": float(distance)} for name, distance in found]


def _report(
    donors: list[dict[str, Any]], pooled: dict[str, dict[str, Any]], farthest: list[dict[str, Any]]
) -> Iterator[str]:
    """The same for eyes."""
    table = []
    for donor in donors:
        nearest, facts = donor["nearest_other"], donor["facts"]
        distance = "no sheet" if not donor["has_sheet"] else "-" if nearest is None else f"{nearest:.2f}"
        described = {name: str(facts.get(name, "-")) for name in _SHOWN}
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
    if not farthest:
        yield "What to measure next cannot be said: no donor has a model file and a known GPU"
        return
    yield "Measure next (farthest from everything measured)"
    yield from tabulate([{**each, "coverage": f"{each['coverage']:.2f}"} for each in farthest])


def possible(seen: dict[str, Facts], sheets: dict[str, HardwareSheet]) -> Iterator[tuple[str, dict[str, Fact]]]:
    """Configurations one could measure: the models seen, on every GPU whose memory holds the weights."""
    for config_id, facts in seen.items():
        try:
            model, _ = model_sheet(architecture(facts))
        except SheetError:
            continue
        if model is None:
            continue
        name = str(facts.get("model", config_id))
        for sheet in sheets.values():
            for gpus in GPUS:
                fits = model.weight_bytes <= gpus * sheet.memory_gb * 1e9 * WEIGHTS_SHARE
                if fits and model.kv_heads % min(gpus, model.kv_heads) == 0:
                    numbers = sheet.facts("auto")
                    changed = {**facts, **numbers, "gpu": sheet.name, "tensor_parallel_size": gpus}
                    yield f"{name} on {gpus} x {sheet.name}", changed
