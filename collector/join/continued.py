"""Exports of an engine that go on where the last one ended, put together: many small ones are laid as one.

To lay 64 steps costs as much as to lay a thousand. What is put together is held back behind other engines' exports, and
is told as if it had come in one piece; so it must be told in a way that neither changes anything: it says nothing but
steps, their ids and times go on, and their engine is long known. Whatever else comes in between first lets go of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from collector.decode import STEP_DTYPE, Telemetry

from .emitter import Key

Told = tuple[str, Telemetry]
"""Recording and telemetry."""


def together(batch: Iterable[Told], goes_on: Callable[[Key, Telemetry, Telemetry | None], bool]) -> Iterator[Told]:
    """What a batch of exports says, in an order and in pieces that make no difference.

    ``goes_on``: whether steps come next for an engine, behind those of another export if there is one.
    """
    held: dict[Key, list[Telemetry]] = {}
    for recording, telemetry in batch:
        key = (recording, telemetry.instance)
        run = held.get(key)
        before = run[-1] if run else None
        next_of_run = _says_only_steps(telemetry) and (before is None or _follows(before, telemetry))
        if next_of_run and goes_on(key, telemetry, before):
            held.setdefault(key, []).append(telemetry)
            continue
        yield from _let_go(held)
        held = {}
        yield recording, telemetry
    yield from _let_go(held)


def _let_go(held: dict[Key, list[Telemetry]]) -> Iterator[Told]:
    for (recording, _), run in held.items():
        yield from ((recording, telemetry) for telemetry in _joined(run))


def _says_only_steps(telemetry: Telemetry) -> bool:
    others = telemetry.core or telemetry.api or telemetry.requests or telemetry.kv
    return bool(len(telemetry.steps)) and not others and not len(telemetry.snapshots)


def _follows(before: Telemetry, telemetry: Telemetry) -> bool:
    """Whether one process says both, the second after the first."""
    last, first = before.steps[-1], telemetry.steps[0]
    return bool(
        (telemetry.process, telemetry.host, telemetry.facts) == (before.process, before.host, before.facts)
        and first["step_id"] == last["step_id"] + 1
        and first["unix_ns"] >= last["unix_ns"]
    )


def _joined(run: Sequence[Telemetry]) -> Sequence[Telemetry]:
    """The run as one, or as it came where step ids or times go back inside of an export."""
    if len(run) == 1:
        return run
    lines = [each.steps.view(np.int64).reshape(len(each.steps), -1) for each in run]  # records are slow to copy
    steps = np.concatenate(lines).view(STEP_DTYPE)[:, 0]
    step_ids, unix_ns = steps["step_id"], steps["unix_ns"]
    if not ((step_ids[1:] == step_ids[:-1] + 1).all() and (unix_ns[1:] >= unix_ns[:-1]).all()):
        return run
    first = run[0]
    return [
        Telemetry(
            first.instance,
            first.facts,
            steps=steps,
            plugin_losses=[loss for each in run for loss in each.plugin_losses],
            process=first.process,
            host=first.host,
            exports=len(run),
            arrived_unix_ns=run[-1].arrived_unix_ns,
            too_new_unix_ns=max(each.too_new_unix_ns for each in run),
        )
    ]
