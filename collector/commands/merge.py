"""``tracefit merge``: what several sidecars learned, as one state.

Statistics are added stratum by stratum, so that the result equals one learner that saw all of it (invariant 6);
what waits in a join window belongs to its sidecar and is left out. The result serves ``donors`` and further merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collector.config import Config
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from collector.worker import check_learning
from exporters.files import write_atomically
from online import Bank, StateError, merge_states


def merge_files(paths: Sequence[Path], out: Path, config: Config, *, say: PrintLine, note: PrintLine) -> int:
    """Merge state files into ``out``.

    A state that is corrupt, does not fit, or has learned the same rows as another one is named, and nothing is written.
    """
    check_learning(config)
    parts = []
    for path in paths:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
    try:
        merged = merge_states(parts, config, names=[str(path) for path in paths], note=note)
    except StateError as error:
        note(str(error))
        return EXIT_FAILED
    try:
        write_atomically(out, merged)
    except OSError as error:
        raise StartError(f"cannot write {out}: {error.strerror}") from None
    bank = Bank(config)
    bank.restore(merged)
    for config_id in bank.configs():
        step = bank.targets(config_id).get("step_time")
        rows = step.models[step.champion].rows if step is not None and step.champion in step.models else 0
        say(f"{config_id}: {rows} step rows")
    say(f"state: {out}")
    return EXIT_OK
