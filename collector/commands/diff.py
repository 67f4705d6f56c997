"""``tracefit diff``: which coefficients moved between two snapshots, and what that does to a typical step."""

from __future__ import annotations

from collections.abc import Iterator

from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine
from exporters.what_if import as_json
from exporters.wording import unit_text
from tracefit import ConfigDiff, Diff, Move, Snapshot, TypicalStep

from .answers import duration


def diff(before: Snapshot, after: Snapshot, *, in_json: bool, say: PrintLine, note: PrintLine) -> int:
    """Print what changed; failed if the two have no configuration, or no coefficient, in common."""
    changes = before.diff(after)
    if in_json:
        say(as_json(_tree(changes)))
    else:
        for line in _lines(changes):
            say(line)
    if any(config.moves for config in changes.configs):
        return EXIT_OK
    known = "coefficient" if changes.configs else "configuration"
    note(f"error: the two snapshots have no {known} in common")
    return EXIT_FAILED


def _lines(changes: Diff) -> Iterator[str]:
    for config in changes.configs:
        yield from _config_lines(config)
    for which, ids in (("first", changes.only_before), ("second", changes.only_after)):
        if ids:
            yield f"only in the {which}: {', '.join(ids)}"


def _config_lines(config: ConfigDiff) -> Iterator[str]:
    renamed = "" if config.before_id == config.after_id else f" -> {config.after_id}"
    yield f"config {config.before_id}{renamed}"
    if not config.moves:
        yield "  nothing to compare: one of the two has no coefficients that the other has"
    target = ""
    for move in config.moves:
        if move.target != target:
            target = move.target
            yield f"  {target}"
        yield f"    {_move(move)}"
    if config.step is not None:
        yield f"  {_step(config.step)}"


def _move(move: Move) -> str:
    distance = "error unknown"
    if move.standard_errors is not None:
        distance = f"{move.standard_errors:+.1f} standard errors{'  MOVED' if move.moved else ''}"
    status = "" if move.status_before == move.status_after else f"  {move.status_before} -> {move.status_after}"
    return (
        f"{move.feature:<24}{move.before:>12,.6g} ->{move.after:>12,.6g} {unit_text(move.unit):<12} {distance}{status}"
    )


def _step(step: TypicalStep) -> str:
    change = f" ({step.after_us / step.before_us - 1.0:+.1%})" if step.before_us > 0.0 else ""
    return (
        f"a typical step ({step.prefill_tokens:,.3g} prefill tokens, {step.requests:,.3g} requests, "
        f"{step.decode_context_tokens:,.0f} tokens of context): "
        f"{duration(step.before_us)} -> {duration(step.after_us)}{change}"
    )


def _tree(changes: Diff) -> dict[str, object]:
    return {
        "configs": [
            {
                "before_id": config.before_id,
                "after_id": config.after_id,
                "moves": [{**move._asdict(), "moved": move.moved} for move in config.moves],
                "step": None if config.step is None else config.step._asdict(),
            }
            for config in changes.configs
        ],
        "only_before": list(changes.only_before),
        "only_after": list(changes.only_after),
    }
