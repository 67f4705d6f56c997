"""What emitters hold that has not become rows: said to people, never asked by the join."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .emitter import Emitter, Key
from .engine import Engine
from .release import Release


class Pending(NamedTuple):
    """Of one emitter; all of it is emitted at ``until_unix_ns`` (the clock here) if nothing comes any more.

    ``until_unix_ns`` is 0 where no clock was told yet.
    """

    instance: str
    steps: int
    requests: int
    rows: int
    until_unix_ns: int


def pending_of(
    emitters: Mapping[Key, Emitter],
    config_ids: Mapping[Key, str],
    releases: Mapping[str, Release],
    heard_unix_ns: Mapping[Key, int],
    idle_ns: int,
) -> list[Pending]:
    """Of the emitters that hold something."""
    configs_of_engines = {config_ids[key] for key, e in emitters.items() if isinstance(e, Engine) and key in config_ids}
    beside = next(iter(configs_of_engines)) if len(configs_of_engines) == 1 else ""
    pending = []
    for key, emitter in emitters.items():
        release = releases.get(config_ids.get(key, beside))
        rows = release.rows_held(emitter.instance) if release is not None else 0
        steps = emitter.pending_steps if isinstance(emitter, Engine) else 0
        if steps or emitter.open_requests or rows:
            heard_ns = heard_unix_ns.get(key)
            until_unix_ns = heard_ns + idle_ns if heard_ns is not None else 0
            pending.append(Pending(key[1], steps, emitter.open_requests, rows, until_unix_ns))
    return pending
