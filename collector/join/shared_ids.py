"""Two processes under one ``service.instance.id``: told by ``process.pid``, ``host.name`` and times, and kept apart.

A process that comes after another one has ended is a restart. Two that overlap in event time are two engines (ranks of
data parallelism with an id that a user set, or one id given to several pods, whose pids may be the same): the one heard
of first keeps the name, the others go by it and their pid.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from collector.decode import Telemetry
from collector.telemetry import Counts, JoinEvent, table
from online.state import saved

from .emitter import Key
from .places import newest_unix_ns

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

    STATE = saved("shared_ids", _lives=dict[Key, dict[int, tuple[int, int]]], _apart=dict[Key, list[int]])

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
