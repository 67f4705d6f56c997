"""``tracefit donors``: what saved states know together, how far it reaches, and what to measure next.

States are pooled exactly (:mod:`online.transfer`): their statistics are added, nothing is averaged. Coverage is the
distance of a configuration to the nearest one measured; the candidates are the models seen on every GPU of the sheets,
on as many of them as hold the weights, farthest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collector.config import Config, JoinConfig
from collector.identity import Fact, Knowledge, shipped_sheets
from collector.recordings import by_source, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from online import Bank, Floats, StateError, Target
from online.features import Facts
from online.features.sheets import HardwareSheet, SheetError, architecture, model_sheet
from online.features.systems import SYSTEMS
from online.state import LineageLedger
from online.transfer import Donor, configuration_vector, coverage, measure_next, pool, select, selection_strata

from .captures import Capture, load
from .fits import ape, learn, predict
from .tables import aligned

STATE_BYTES_MAX = 256 * 2**20
NEXT = 5
GPUS = (1, 2, 4, 8)
WEIGHTS_SHARE = 0.8
"""Of a GPU's memory, what weights may take; the rest is KV cache and activations."""

_SHOWN = ("model", "gpu", "tensor_parallel_size", "dtype", "max_num_seqs", "max_num_batched_tokens")


class DonorOptions(NamedTuple):
    """What the command line said."""

    per_stratum: int = 20
    recordings: tuple[Path, ...] = ()


def compare_donors(
    paths: Sequence[Path], config: Config, options: DonorOptions, *, say: PrintLine, note: PrintLine
) -> int:
    """Pool the states under the paths and report.

    Args:
        paths: state files, or directories that hold some (``*.bin``).
        config: hardware and rules of the ``configurations`` section.
        options: recordings of a donor whose rows are to be chosen from, and how many per stratum.
        say: receives the report, line by line.
        note: receives what was left out and why.

    Returns:
        Exit code: failed if no state could be used.
    """
    bank = Bank(Config(feature_sets=("portable", *(system.name for system in SYSTEMS)), learners=("rls",)))
    found = read_states(paths, bank, note)
    if not found:
        note("no donor among them")
        return EXIT_FAILED
    for line in _donor_table(found):
        say(line)
    for line in _pooled(found):
        say(line)
    for line in _measure_next({config_id: facts for config_id, (facts, _) in found.items()}):
        say(line)
    if options.recordings:
        knowledge = Knowledge(config.configurations)
        for recordings in by_source(open_recordings(options.recordings, note)):
            for capture in load(recordings, knowledge, JoinConfig(), 0.6):
                for line in _selection(capture, options.per_stratum):
                    say(line)
    return EXIT_OK


def read_states(paths: Sequence[Path], bank: Bank, note: PrintLine) -> dict[str, tuple[Facts, list[Donor]]]:
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
        elif path.exists():
            yield path
        else:
            raise StartError(f"cannot read {path}: there is no such file or directory")


def _donor_table(found: dict[str, tuple[Facts, list[Donor]]]) -> Iterator[str]:
    vectors = {config_id: configuration_vector(facts) for config_id, (facts, _) in found.items()}
    table = [["donor", *_SHOWN, "rows", "nearest other"]]
    for config_id, (facts, donors) in found.items():
        mine = vectors[config_id]
        others = [v for other, v in vectors.items() if other != config_id and v is not None]
        distance = "no sheet" if mine is None else f"{coverage(mine, others):.2f}" if others else "-"
        rows = max((d.rows for d in donors if d.features.target is Target.STEP_TIME), default=0.0)
        table.append([config_id, *(str(facts.get(name, "-")) for name in _SHOWN), f"{rows:.0f}", distance])
    yield "Donors"
    yield from aligned(table)


def _pooled(found: dict[str, tuple[Facts, list[Donor]]]) -> Iterator[str]:
    donors = [d for _, many in found.values() for d in many if d.features.target is Target.STEP_TIME]
    for system in SYSTEMS:
        mine = [d for d in donors if d.features.name == system.name]
        pooled = pool(system, Target.STEP_TIME, mine)
        if pooled is None:
            continue
        yield ""
        yield f"{system.name}: {len(pooled.donors)} donors pooled"
        known = [(name, value) for name, value in zip(pooled.names, pooled.gamma, strict=True) if value > 0.0]
        yield from aligned([["coefficient", "value"], *([name, f"{value:.4g}"] for name, value in known)])


def _measure_next(seen: dict[str, Facts]) -> Iterator[str]:
    known = [v for facts in seen.values() if (v := configuration_vector(facts)) is not None]
    candidates = {
        name: v for name, facts in possible(seen, shipped_sheets()) if (v := configuration_vector(facts)) is not None
    }
    yield ""
    if not known or not candidates:
        yield "What to measure next cannot be said: no donor has a model file and a known GPU"
        return
    yield "Measure next (farthest from everything measured)"
    found = measure_next(candidates, known, NEXT)
    yield from aligned([["configuration", "coverage"], *([name, f"{distance:.2f}"] for name, distance in found)])


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


def _selection(capture: Capture, per_stratum: int) -> Iterator[str]:
    """Which rows of a recording are worth keeping, and what a fit of them alone is worth."""
    target = Target.STEP_TIME
    rows = capture.learned.get(target)
    system = next(s for s in SYSTEMS if s.name == "physics")
    features = system.live(target, capture.facts)
    if rows is None or features is None or len(rows) == 0:
        yield f"{capture.name}: no rows to choose from, or no sheet"
        return
    stratum = selection_strata(target, rows)
    kept = select(features.evaluate(rows), rows.elapsed_us, stratum, per_stratum)
    scored = capture.scored(target)

    def score(index: Sequence[int] | Floats) -> str:
        model = learn(features, rows.take(np.asarray(index, np.intp)))
        errors = ape(predict(model, features, scored), scored.elapsed_us) if model is not None else np.empty(0)
        return f"{100 * float(errors.mean()):.1f} %" if len(errors) else "-"

    yield ""
    strata = len(set(stratum.tolist()))
    yield f"{capture.name}: {len(kept)} of {len(rows)} rows kept in {strata} strata; physics fitted on"
    yield from aligned(
        [
            ["rows", "step error on the rest"],
            ["those kept", score(kept.tolist())],
            ["as many, the first", score(list(range(len(kept))))],
            ["all", score(list(range(len(rows))))],
        ]
    )
