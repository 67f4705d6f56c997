"""Who is held: places for a bounded number of emitters, shared names, emitters of one engine, successors, descriptions.

Places. A newcomer takes a free place, or that of the emitter silent longest if it has been silent for longer than
``window_s``; else it is refused, telemetry and all, and counted. What was learned of the others is not touched. Silence
is measured by when telemetry came in, whatever times its sender claims; in a replay nobody knows that, and event times
tell it.

Shared names. Two processes under one ``service.instance.id`` are told by ``process.pid``, ``host.name`` and times. One
that comes after another has ended is a restart. Two that overlap in event time are two engines (ranks of data
parallelism with an id that a user set, or one id given to several pods, whose pids may be the same): the one heard of
first keeps the name, the others go by it and their pid.

One engine. Two emitters on it (an instrumented vLLM with the producer plugin) are told by their stamps, counted once.

Successors. A server that is started again under another ``service.instance.id`` is a new emitter, and nobody says that
the old one ended. It did if another one of its model began to send on the same machine (``host.name``; or, where nobody
says it, this one) after the old one's last event, and has gone on for longer than spans may be late. As soon as the old
one sends again, both are alive.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from collector.config import Config
from collector.decode import Telemetry
from collector.telemetry import Counts, JoinEvent, table
from online import Quality

from .emitter import Emitter, Key, facts_of, key_of
from .engine import Engine
from .events import Described
from .window import StepWindow

_REFUSED_MAX = 1024
"""Names remembered of emitters that found no place."""


class Full(Exception):
    """Every place is taken by an emitter that is alive."""


class Places:
    """Bounded by ``engines_max``."""

    def __init__(self, settings: Config) -> None:
        self._places_max = settings.engines_max
        self._window_ns = int(settings.join_timeout_s * 1e9)
        self._refused: OrderedDict[Key, int] = OrderedDict()

    @property
    def refused(self) -> int:
        """Emitters that found no place lately."""
        return len(self._refused)

    def make_room(
        self,
        emitters: Mapping[Key, Emitter],
        heard_unix_ns: Mapping[Key, int],
        key: Key,
        telemetry: Telemetry,
        counts: Counts,
    ) -> list[Key]:
        """Who has to go so that a newcomer has a place.

        Args:
            emitters: who has one.
            heard_unix_ns: when each of them was heard of last, where that is known.
            key: the newcomer's.
            telemetry: what it said first.
            counts: what became of it is added.

        Raises:
            Full: nobody is gone; the newcomer is counted and remembered as refused.
        """
        gone: list[Key] = []
        if len(emitters) >= self._places_max:
            unix_ns = telemetry.arrived_unix_ns or newest_unix_ns(telemetry)
            heard = {each: heard_unix_ns.get(each) or emitters[each].event_unix_ns for each in emitters}
            gone = self._silent_longest(heard, unix_ns if telemetry.arrived_unix_ns else max(unix_ns, *heard.values()))
            if not gone:
                self._refuse(key, unix_ns)
                counts[table.JOIN_EVENTS, JoinEvent.ENGINE_REFUSED] += 1
                raise Full
        self._refused.pop(key, None)
        counts[table.JOIN_EVENTS, JoinEvent.ENGINE_EVICTED] += len(gone)
        return gone

    def _refuse(self, key: Key, unix_ns: int) -> None:
        self._refused[key] = unix_ns
        self._refused.move_to_end(key)
        while len(self._refused) > _REFUSED_MAX or next(iter(self._refused.values())) < unix_ns - self._window_ns:
            self._refused.popitem(last=False)

    def _silent_longest(self, heard_unix_ns: Mapping[Key, int], now_unix_ns: int) -> list[Key]:
        """The emitter silent longest, if that is long enough to call it gone."""
        oldest = min(heard_unix_ns, key=lambda key: heard_unix_ns[key])
        return [oldest] if heard_unix_ns[oldest] < now_unix_ns - self._window_ns else []


def newest_unix_ns(telemetry: Telemetry) -> int:
    """The newest event in it."""
    ends = [int(telemetry.steps["unix_ns"].max())] if len(telemetry.steps) else []
    ends += [span.end_unix_ns for span in telemetry.core]
    ends += [span.end_unix_ns for span in telemetry.requests]
    return max(ends, default=0)


_OVERLAP_NS = 1_000_000_000
"""Spans of a process that ended may come after the first ones of the next; a whole second of steps does not."""
_PROCESSES_MAX = 64
"""Of one id: those heard of longest ago are forgotten."""
_IDS_MAX = 4096


class SharedId(msgspec.Struct):
    """In a checkpoint: first and newest event of each process under an id, and which are engines of their own."""

    instance: str
    lives: list[tuple[int, int, int]]
    apart: list[int]


class SharedIds:
    """By id: first and newest event of each process that used it, and which of them are engines of their own."""

    def __init__(self) -> None:
        self._lives: dict[Key, dict[int, tuple[int, int]]] = {}
        self._apart: dict[Key, list[int]] = {}

    def to_checkpoint(self) -> list[SharedId]:
        """Of live ids under which more than one process was seen."""
        return [
            SharedId(key[1], [(process, *life) for process, life in lives.items()], self._apart.get(key, []))
            for key, lives in self._lives.items()
            if not key[0] and self._apart.get(key)
        ]

    def restore(self, shared: Sequence[SharedId]) -> None:
        """Know them again."""
        for each in shared:
            self._lives["", each.instance] = {process: (first, newest) for process, first, newest in each.lives}
            self._apart["", each.instance] = list(each.apart)

    def key_of(self, key: Key, telemetry: Telemetry, counts: Counts) -> Key:
        """The engine's key; another one than the id's for a process that runs beside the one known by it."""
        process, unix_ns = _number_of(telemetry), newest_unix_ns(telemetry)
        if not process or not unix_ns:
            return key
        lives = self._lives.setdefault(key, {})
        first_ns, newest_ns = lives.pop(process, (unix_ns, unix_ns))
        first_ns, newest_ns = min(first_ns, unix_ns), max(newest_ns, unix_ns)
        beside = [
            other
            for other, (begun_ns, ended_ns) in lives.items()
            if min(ended_ns, newest_ns) - max(begun_ns, first_ns) > _OVERLAP_NS
        ]
        lives[process] = first_ns, newest_ns
        apart = self._apart.setdefault(key, [])
        together = sorted((process, *beside), key=lambda each: (lives[each][0], each))
        for later in together[1:]:
            if later not in apart:
                apart.append(later)
                counts[table.JOIN_EVENTS, JoinEvent.ID_SHARED] += 1
        self._forget(key)
        on_host = f" on {telemetry.host}" if telemetry.host else ""
        return (key[0], f"{key[1]} (pid {telemetry.process}{on_host})") if process in apart else key

    def _forget(self, key: Key) -> None:
        lives = self._lives[key]
        while len(lives) > _PROCESSES_MAX:
            gone = next(iter(lives))
            del lives[gone]
            self._apart[key] = [process for process in self._apart[key] if process != gone]
        while len(self._lives) > _IDS_MAX:
            forgotten = next(iter(self._lives))
            del self._lives[forgotten]
            self._apart.pop(forgotten, None)


def _number_of(telemetry: Telemetry) -> int:
    """One number of 63 bits for a pid and the host it counts on; 0 without a pid."""
    host_bits = zlib.crc32(telemetry.host.encode("utf-8", "replace")) & 0x7FFFFFFF
    return telemetry.process and (host_bits << 32 | telemetry.process & 0xFFFFFFFF)


_STEPS_MIN = 20
_TOLERANCE_NS = 50_000
"""Both read CLOCK_MONOTONIC at entry of the same schedule() call; they differ by 0.5-1.6 us (wire contract §9)."""
_SHARE_MIN = 0.9
"""Of the steps that both tell: two engines that begin in the same moment run side by side for their first ones."""


def find_double(engine: Engine, engines: Mapping[Key, Engine]) -> tuple[Engine, Engine, Key] | None:
    """Which of two emitters goes on, which one falls silent, and the key of that one; None without a second one."""
    for key, other in engines.items():
        if other is engine or other.recording != engine.recording or not same_engine(engine, other):
            continue
        if other.quality <= engine.quality:
            return other, engine, next(k for k, e in engines.items() if e is engine)
        return engine, other, key
    return None


def same_engine(a: Engine, b: Engine) -> bool:
    """Whether the two agree on (step id, ts_start) for enough steps, and for nearly all that both tell."""
    first, second = a.newest_window, b.newest_window
    if first is None or second is None:
        return False
    low, high = max(first.base, second.base), min(first.newest_step, second.newest_step) + 1
    if high - low < _STEPS_MIN or all(_apart(first, second, step) for step in (high - 1, (low + high) // 2)):
        return False
    here, there = slice(low - first.base, high - first.base), slice(low - second.base, high - second.base)
    both = first.rebuilt["seen"][here] & second.rebuilt["seen"][there]
    apart = np.abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there])
    agreed = int(np.count_nonzero(both & (apart <= _TOLERANCE_NS)))
    return agreed >= max(_STEPS_MIN, _SHARE_MIN * int(np.count_nonzero(both)))


def _apart(first: StepWindow, second: StepWindow, step: int) -> bool:
    """Whether both tell this step, and do not agree: of a thousand engines nearly all are told apart by two steps."""
    here, there = step - first.base, step - second.base
    if not (first.rebuilt["seen"][here] and second.rebuilt["seen"][there]):
        return False
    return bool(abs(first.steps["ts_start_ns"][here] - second.steps["ts_start_ns"][there]) > _TOLERANCE_NS)


_HERE = "here"
_LOOPBACK = ("127.0.0.1:", "[::1]:", "%5B::1%5D:")
"""How addresses of senders on this machine begin, behind the kind of address."""


class Begin(NamedTuple):
    """On which machine an emitter runs, empty if unknown, and its first event, 0 if it was there before."""

    machine: str
    unix_ns: int

    @staticmethod
    def of(telemetry: Telemetry, *, first: bool) -> Begin:
        """As told by what an emitter sends; ``first``: nothing came from it before."""
        _, _, address = telemetry.peer.partition(":")
        machine = telemetry.host or (_HERE if address.startswith(_LOOPBACK) else "")
        return Begin(machine, newest_unix_ns(telemetry) if first else 0)


def replaced_configs(
    by_config: Mapping[str, Iterable[Emitter]], begins: Mapping[Key, Begin], late_ns: int
) -> dict[str, str]:
    """By configuration none of whose emitters is left: what the server sends now.

    Args:
        by_config: every configuration with its emitters.
        begins: of those heard of; the others are alive.
        late_ns: how late a span may come after its end.
    """
    heirs: dict[str, list[tuple[int, int, str, Emitter]]] = {}
    for config_id, emitters in by_config.items():
        for emitter in emitters:
            begin = begins.get(key_of(emitter))
            if begin is not None and begin.machine and begin.unix_ns:
                heirs.setdefault(begin.machine, []).append(
                    (begin.unix_ns, emitter.event_unix_ns - late_ns, config_id, emitter)
                )
    replaced = {}
    for config_id, emitters in by_config.items():
        found = [_heir_of(config_id, emitter, begins, heirs) for emitter in emitters]
        if found and all(found):
            replaced[config_id] = found[-1]
    return replaced


def _heir_of(
    config_id: str,
    emitter: Emitter,
    begins: Mapping[Key, Begin],
    heirs: Mapping[str, list[tuple[int, int, str, Emitter]]],
) -> str:
    begin, ended_ns = begins.get(key_of(emitter)), emitter.event_unix_ns
    if begin is None or emitter.recording:
        return ""
    later = [
        (begun_ns, other_id)
        for begun_ns, until_ns, other_id, other in heirs.get(begin.machine, ())
        if other_id != config_id and begun_ns >= ended_ns and until_ns > ended_ns and _same_model(emitter, other)
    ]
    return max(later, default=(0, ""))[1]


def _same_model(one: Emitter, other: Emitter) -> bool:
    model, others = one.facts.get("model"), other.facts.get("model")
    return model == others or None in (model, others)


class Known(NamedTuple):
    """What is known of a configuration: the best telemetry that it sends, and the version of each emitter's facts."""

    quality: Quality
    versions: tuple[tuple[str, int], ...]


def _known_of(emitters: Iterable[Emitter]) -> Known:
    """What the emitters of one configuration say together."""
    emitters = list(emitters)
    return Known(
        min(emitter.quality for emitter in emitters),
        tuple((emitter.instance, emitter.facts.version) for emitter in emitters),
    )


def describe(emitters: Mapping[str, list[Emitter]], known: dict[str, Known]) -> list[Described]:
    """Configurations (``emitters`` by each) of which something else is known than before; ``known`` follows."""
    for gone in known.keys() - emitters.keys():
        del known[gone]
    described = []
    for config_id, own in sorted(emitters.items()):
        if known.get(config_id) != (now := _known_of(own)):
            known[config_id] = now
            described.append(Described(config_id, facts_of(own), now.quality))
    return described
