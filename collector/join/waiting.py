"""What an emitter holds that gave no rows yet, and what that waits for: said to people, never asked by the join."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

from collector.telemetry import Wait

from .emitter import Emitter, Key
from .engine import Engine
from .release import Release


class Waiting(NamedTuple):
    """Of one emitter.

    ``config_id``: where its rows go, empty if nowhere. ``reason``: of the first that waits, None where nothing does.
    ``heard``: pieces of telemetry so far.
    """

    key: Key
    config_id: str
    steps: int
    requests: int
    rows: int
    reason: Wait | None
    heard: int


def waiting_of(
    emitters: Mapping[Key, Emitter],
    config_ids: Mapping[Key, str],
    releases: Mapping[str, Release],
    heard: Mapping[Key, int],
    put_off: Container[Key],
) -> list[Waiting]:
    """What each emitter holds; ``put_off``: engines whose few steps wait for the next ones."""
    configs_of_engines = {config_ids[key] for key, e in emitters.items() if isinstance(e, Engine) and key in config_ids}
    beside = next(iter(configs_of_engines)) if len(configs_of_engines) == 1 else ""
    return [
        _waiting_of_one(key, config_ids.get(key, beside), emitter, releases, heard.get(key, 0), put_off=key in put_off)
        for key, emitter in emitters.items()
    ]


def _waiting_of_one(
    key: Key, config_id: str, emitter: Emitter, releases: Mapping[str, Release], heard: int, *, put_off: bool
) -> Waiting:
    release = releases.get(config_id)
    rows = release.rows_held(emitter.instance) if release is not None else 0
    requests = emitter.open_requests
    steps, reason = _steps_of(emitter, put_off=put_off) if isinstance(emitter, Engine) else (0, None)
    if reason is None and requests:
        reason = Wait.REQUESTS
    if reason is None and rows:
        reason = Wait.TURN
    return Waiting(key, config_id, steps, requests, rows, reason, heard)


def _steps_of(engine: Engine, *, put_off: bool) -> tuple[int, Wait | None]:
    """Steps without rows; all of them while the first rows of a process are held back.

    The newest steps of a process of which all are final only wait for a next one: they do not count.
    """
    waits = [
        (sequence, sequence.window)
        for sequence in engine.sequences
        if sequence.window is not None and sequence.window.size
    ]
    if not engine.released:
        held = sum(window.size for _, window in waits)
        reasons = [sequence.waits_for for sequence, _ in waits]
    else:
        blocked = [(sequence, window) for sequence, window in waits if put_off or sequence.waits_for is not None]
        held = sum(w.newest_step + 1 - sequence.frontier.first_boundary(w.base) for sequence, w in blocked)
        reasons = [sequence.waits_for for sequence, _ in blocked]
    unsaid = Wait.NEXT_STEPS if put_off else Wait.FIRST_STEPS
    return held, next((reason for reason in reasons if reason is not None), unsaid if held else None)
