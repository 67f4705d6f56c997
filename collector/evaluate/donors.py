"""``tracefit lab donors``: how far configurations that were learned are apart, and which one to measure next.

The candidates are the models seen on every GPU of the sheets, on as many of them as hold the weights. How far one is
from everything measured is a distance in the space of RECE (docs/systems.md):

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

from collector.commands import Report
from collector.config import Config
from collector.identity import shipped_sheets
from collector.runtime import EXIT_FAILED, EXIT_OK, print_stderr
from collector.service import state_files
from online import Bank, Floats, StateError
from online.features import Facts
from online.features.sheets import model_sheet, sheet_of

from .command import tabulate

NEXT = 5
GPUS = (1, 2, 4, 8)
WEIGHTS_SHARE = 0.8
"""Of a GPU's memory, what weights may take; the rest is KV cache and activations."""

_SHOWN = ("model", "gpu", "tensor_parallel_size", "dtype", "max_num_seqs", "max_num_batched_tokens")


def compare_donors(paths: Sequence[Path]) -> Report:
    """The configurations in the states under the paths; failed if there is none."""
    seen = dict(sorted(_facts_in(paths)))
    if not seen:
        return Report(EXIT_FAILED, notes=["error: no donor among them: tracefit replay … --state OUT makes one"])
    points = {
        config_id: point for config_id, facts in seen.items() if (point := configuration_vector(facts)) is not None
    }
    document: dict[str, Any] = {
        "donors": [_donor(config_id, facts, points) for config_id, facts in seen.items()],
        "measure_next": _farthest(seen, list(points.values())),
    }
    return Report(EXIT_OK, _report(**document), document)


def _facts_in(paths: Sequence[Path]) -> Iterator[tuple[str, Facts]]:
    """Configurations of the states under the paths, and what is known of each; what is no state is noted."""
    for file in chain.from_iterable(map(state_files, paths)):
        bank = Bank(Config(learners=("rls",)))
        try:
            bank.restore(file.read_bytes())
        except (OSError, StateError) as error:
            print_stderr(f"{file.name}: {error}")
        yield from ((config_id, bank.facts(config_id)) for config_id in bank.configs())


def _donor(config_id: str, facts: Facts, points: Mapping[str, Floats]) -> dict[str, Any]:
    """A configuration, and how far the nearest other one is; None without a sheet, or without another."""
    others = [point for other, point in points.items() if other != config_id]
    return {
        "config_id": config_id,
        "facts": {name: facts[name] for name in _SHOWN if name in facts},
        "nearest_other": coverage(points[config_id], others) if config_id in points and others else None,
    }


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
        model, _ = model_sheet(facts)
        if model is None:
            continue
        for sheet, gpus in product(shipped_sheets().values(), GPUS):
            fits = model.weight_bytes <= gpus * sheet.memory_gb * 1e9 * WEIGHTS_SHARE
            changed = {**facts, **sheet.facts("auto"), "gpu": sheet.name, "tensor_parallel_size": gpus}
            if fits and model.kv_heads % min(gpus, model.kv_heads) == 0:
                point = configuration_vector(changed)
                if point is not None:
                    yield f"{facts.get('model', config_id)} on {gpus} x {sheet.name}", point


def _report(donors: list[dict[str, Any]], measure_next: list[dict[str, Any]]) -> Iterator[str]:
    """The same for eyes."""
    yield "Donors"
    yield from tabulate(
        [
            {"donor": each["config_id"]}
            | {name: str(each["facts"].get(name, "-")) for name in _SHOWN}
            | {"nearest other": _distance(each["nearest_other"])}
            for each in donors
        ]
    )
    yield ""
    if not measure_next:
        yield "What to measure next cannot be said: no donor has a model file and a known GPU"
        return
    yield "Measure next (farthest from everything measured)"
    yield from tabulate([{**each, "coverage": _distance(each["coverage"])} for each in measure_next])


def _distance(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


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
