"""``tracefit merge``: what several sidecars learned, as one state.

Statistics are added stratum by stratum, so that the result equals one learner that saw all of it (invariant 6);
what waits in a join window belongs to its sidecar and is left out. The result serves ``donors`` and further merges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from collector.config import Config
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from collector.worker import check_learning
from exporters.snapshot_file import write_atomically
from online import Bank, StateError, TargetSnapshot, merge_states

from .fleet_document import fleet_snapshot

_REPLICAS_NAMED = 16


def merge_files(
    paths: Sequence[Path],
    out: Path,
    config: Config,
    *,
    say: PrintLine,
    note: PrintLine,
    snapshot: Path | None = None,
) -> int:
    """Merge state files into ``out``.

    A state that is corrupt, does not fit, or has learned the same rows as another one is named, and nothing is written;
    nor is it where none of them has learned anything.

    Args:
        paths: the states, in any order.
        out: where the merged state goes.
        config: which models to keep.
        say: takes what was merged.
        note: takes errors, and who differs from the others.
        snapshot: where the coefficients go, if anywhere.
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
    bank = Bank(config)
    bank.restore(merged)
    whole = fleet_snapshot(bank)
    if not whole.configs:
        note("nothing to merge: no row was learned in any of the states (what still waits for others is not merged)")
        return EXIT_FAILED
    for target, data in ((out, merged), (snapshot, whole.to_json())):
        if target is not None:
            _write(target, data)
    for each in whole.configs:
        step = each.targets.get("step_time")
        rows = step.models[step.champion].rows if step is not None and step.champion in step.models else 0
        say(f"{each.config_id}: {rows} step rows")
        for name, learned in each.targets.items():
            for line in differing(learned):
                note(f"warning: {each.config_id} {name}: {line}")
    say(f"state: {out}")
    return EXIT_OK


def differing(target: TargetSnapshot) -> Iterator[str]:
    """Sentences on the replicas of a target that differ from the others."""
    odd = [replica for replica in target.replicas if replica.differs]
    for replica in odd[:_REPLICAS_NAMED]:
        error = "" if replica.stderr is None else f" ± {replica.stderr:.3f}"
        yield f"engine {replica.engine or 'unknown'!r} takes {replica.ratio:.3f}{error} times as long as the others"
    if len(odd) > _REPLICAS_NAMED:
        yield f"{len(odd) - _REPLICAS_NAMED} more engines differ from the others"


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
