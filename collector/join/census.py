"""Until when the rows of several emitters are all here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from collector.config import JoinConfig
from online import Ints

from .emitter import Emitter, Key

_TURN_NS, _LONG_TURN_NS = 1_000_000_000, 4_000_000_000
"""Rows of several engines leave by the second, of many by four: every piece of an engine's rows has its cost."""
_MANY = 100


def watermark_of(emitters: Sequence[Emitter], settings: JoinConfig) -> int | None:
    """Until when (wall clock ns) the rows of one configuration's emitters that are not idle are all here.

    None where there are none: nobody is waited for. See :func:`horizon`.
    """
    if not emitters:
        return None
    event_unix_ns, safe_unix_ns = np.array([(each.event_unix_ns, each.safe_unix_ns) for each in emitters]).T
    until_unix_ns = horizon(event_unix_ns, safe_unix_ns, settings)
    if len(emitters) == 1:
        return until_unix_ns
    turn_ns = _TURN_NS if len(emitters) < _MANY else _LONG_TURN_NS
    return until_unix_ns // turn_ns * turn_ns


def engine_configs_of(engines: Iterable[Key], config_ids: Mapping[Key, str]) -> dict[str, set[str]]:
    """Configurations of engines, by recording."""
    configs: dict[str, set[str]] = {}
    for key in engines:
        configs.setdefault(key[0], set()).add(config_ids[key])
    return configs


def horizon(event_unix_ns: Ints, safe_unix_ns: Ints, settings: JoinConfig) -> int:
    """Until when (wall clock ns) the rows of these emitters (n,) are all here.

    Always ``grace_s`` behind the newest event: by then an engine not heard of before would have spoken. An engine
    silent for ``window_s`` is not waited for.
    """
    newest = int(event_unix_ns.max())
    grace = newest - int(settings.grace_s * 1e9)
    if len(event_unix_ns) == 1:
        return grace
    speaking = event_unix_ns >= newest - int(settings.window_s * 1e9)
    return min(grace, int(safe_unix_ns[speaking].min()))
