"""Who is held: places for a bounded number of emitters, doubles of one engine, successors, descriptions.

Places. A newcomer takes a free place, or that of the emitter silent longest if it has been silent for longer than
``join_timeout_s``; else it is refused, telemetry and all, and counted. What was learned of the others is not touched.
Silence is measured by when telemetry came in, whatever times its sender claims; in a replay nobody knows that, and
event times tell it.

Doubles. Two emitters on one engine (an instrumented vLLM with the producer plugin) are told by their stamps; the steps
are learned from the one that tells more.

Successors. A server that is started again under another ``service.instance.id`` is a new emitter, and nobody says that
the old one ended. It did if another one of its model began to send on the same machine (``host.name``; or, where nobody
says it, this one) after the old one's last event, and has gone on for longer than spans may be late. As soon as the old
one sends again, both are alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from collector.config import Config
from collector.decode import Telemetry
from online import Quality

from .emitter import Emitter, Key, facts_of, newest_unix_ns
from .engine import Engine
from .events import ConfigUpdated
from .window import StepWindow

E = TypeVar("E", bound=Emitter)

_REFUSED_MAX = 1024
"""Names remembered of emitters that found no place."""


def of_one_server(one: Emitter, others: Iterable[E]) -> list[E]:
    """Those of its recording whose server says nothing else of itself: model, GPU, version, limits."""
    said = one.facts.held()
    return [each for each in others if each.recording == one.recording and not each.facts.is_another_server(said)]


class EngineLimit:
    """Bounded by ``engines_max``; doubles need none, of whom as many more are held."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._refused: OrderedDict[Key, int] = OrderedDict()

    @property
    def refused(self) -> int:
        """Emitters that found no place lately."""
        return len(self._refused)

    def key_to_evict(self, emitters: Mapping[Key, Emitter], key: Key, telemetry: Telemetry) -> Key | None:
        """Who has to go so that a newcomer has a place: itself, if none of the emitters has been silent for long.

        ``telemetry`` is what the newcomer said first. None: there is place for it.
        """
        single = {each: one for each, one in emitters.items() if not one.is_duplicate}
        gone = None
        if len(single) >= self._settings.engines_max or len(emitters) >= 2 * self._settings.engines_max:
            heard = {each: one.last_seen_unix_ns or one.event_unix_ns for each, one in single.items()}
            oldest = min(heard, key=lambda each: heard[each])
            newest_ns = telemetry.arrived_unix_ns or newest_unix_ns(telemetry)
            now_ns = telemetry.arrived_unix_ns or max(newest_ns, *heard.values())
            if heard[oldest] >= now_ns - self._settings.timeout_ns:
                self._refuse(key, newest_ns)
                return key
            gone = oldest
        self._refused.pop(key, None)
        return gone

    def _refuse(self, key: Key, unix_ns: int) -> None:
        self._refused[key] = unix_ns
        self._refused.move_to_end(key)
        long_ago_ns = unix_ns - self._settings.timeout_ns
        while len(self._refused) > _REFUSED_MAX or next(iter(self._refused.values())) < long_ago_ns:
            self._refused.popitem(last=False)


_STEPS_MIN = 20
_TOLERANCE_NS = 50_000
"""Both read CLOCK_MONOTONIC at entry of the same schedule() call; they differ by 0.5-1.6 us (wire contract §9)."""
_SHARE_MIN = 0.9
"""Of the steps that both tell: two engines that begin in the same moment run side by side for their first ones."""


def find_duplicate_emitters(engine: Engine, engines: Iterable[Engine]) -> tuple[Engine, Engine] | None:
    """Which of two emitters on this engine tells more, and which one less; None without a second one."""
    for other in engines:
        if other is engine or other.recording != engine.recording or other.is_duplicate:
            continue
        if is_same_engine(engine, other):
            return (other, engine) if other.quality <= engine.quality else (engine, other)
    return None


def is_same_engine(a: Engine, b: Engine) -> bool:
    """Whether the two agree on (step id, ts_start) for enough steps, and for nearly all that both tell."""
    first, second = a.newest_process.window, b.newest_process.window
    low, high = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
    if high - low < _STEPS_MIN:
        return False
    agreed, both = _agree(first, second, low, high)
    return agreed >= max(_STEPS_MIN, _SHARE_MIN * both)


def _agree(first: StepWindow, second: StepWindow, low: int, high: int) -> tuple[int, int]:
    """Of steps low..high-1: those on whose start both agree, and those that both tell."""
    here, there = slice(low - first.base, high - first.base), slice(low - second.base, high - second.base)
    both = first.rebuilt["seen"][here] & second.rebuilt["seen"][there]
    apart = np.abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there])
    return int(np.count_nonzero(both & (apart <= _TOLERANCE_NS))), int(np.count_nonzero(both))


def replaced_configs(by_config: Mapping[str, Sequence[Emitter]], late_ns: int) -> dict[str, str]:
    """By configuration none of whose emitters is left: what the server sends now.

    Args:
        by_config: every configuration with its emitters; those not heard of since a restart of ours are alive.
        late_ns: how late a span may come after its end.
    """
    heirs: dict[str, list[tuple[str, Emitter]]] = {}
    for config_id, emitters in by_config.items():
        for emitter in emitters:
            if emitter.machine and emitter.begun_unix_ns:
                heirs.setdefault(emitter.machine, []).append((config_id, emitter))

    def heir_of(config_id: str, emitter: Emitter) -> str:
        if emitter.machine is None or emitter.recording:
            return ""
        ended_ns = emitter.event_unix_ns
        later = [
            (heir.begun_unix_ns, other_id)
            for other_id, heir in heirs.get(emitter.machine, ())
            if other_id != config_id and ended_ns <= heir.begun_unix_ns and ended_ns < heir.event_unix_ns - late_ns
            if _is_same_model(emitter, heir)
        ]
        return max(later, default=(0, ""))[1]

    replaced = {}
    for config_id, emitters in by_config.items():
        found = [heir_of(config_id, emitter) for emitter in emitters]
        if found and all(found):
            replaced[config_id] = found[-1]
    return replaced


def _is_same_model(one: Emitter, other: Emitter) -> bool:
    model, others = one.facts.get("model"), other.facts.get("model")
    return model == others or None in (model, others)


Known = tuple[Quality, tuple[tuple[str, int], ...]]
"""Of a configuration: the best telemetry that it sends, and the version of each emitter's facts."""


def describe(emitters: Mapping[str, Sequence[Emitter]], known: dict[str, Known]) -> list[ConfigUpdated]:
    """Configurations (``emitters`` by each) of which something else is known than before; ``known`` follows."""
    for gone in known.keys() - emitters.keys():
        del known[gone]
    described = []
    for config_id, own in sorted(emitters.items()):
        now = min(one.quality for one in own), tuple((one.instance, one.facts.version) for one in own)
        if known.get(config_id) != now:
            known[config_id] = now
            described.append(ConfigUpdated(config_id, facts_of(own), now[0]))
    return described
