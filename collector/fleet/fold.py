"""Many states into one, with memory for one: who is taken is decided first, then they are added in order of time.

Of states that share rows the newest is taken (online/state/lineage.py); the order of the sum is that of event time, and
of the bytes where that is equal, so that neither the order of the sources nor who was unreachable the last time shows.
Streams that follow each other, or all overlap, give the same in any tree; this is a list, because adding one state
costs little beside reading it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collector.config import Config
from collector.identity import Fact
from collector.telemetry import PullOutcome
from online import Bank, StateError
from online.state import Lineage, LineageLedger

from .state_fetch import Fetched

FUTURE_NS = 3_600_000_000_000
"""Rows of later than this from now have a wrong clock behind them."""
NEVER_NS = 1 << 62
"""As now, where they have not: recordings may be of any time."""


class Examined(NamedTuple):
    """A state that can be read, and what decides whether and when it is added."""

    fetched: Fetched
    digest: bytes
    first_ns: int
    last_ns: int
    rows: int
    lineages: Mapping[str, Lineage]
    facts: Mapping[str, Mapping[str, Fact]]
    anonymous: bool
    """An earlier version saved it without its engines."""

    @property
    def engines(self) -> list[str]:
        """Names of the engines whose rows are in it."""
        return sorted({engine for lineage in self.lineages.values() for engine in lineage.engines})


def examine(fetched: Fetched, path: Path, config: Config, now_unix_nano: int) -> Examined | Fetched:
    """What is in a state; the fetched one with the reason if it cannot be used."""
    bank = Bank(config)
    try:
        data = path.read_bytes()
        bank.restore(data)
    except OSError as error:
        return fetched._replace(path=None, outcome=PullOutcome.UNREACHABLE, detail=error.strerror or str(error))
    except StateError as error:
        return fetched._replace(path=None, outcome=PullOutcome.UNREADABLE, detail=str(error))
    first_ns, last_ns = bank.event_span_ns()
    if last_ns - now_unix_nano > FUTURE_NS:
        hours = (last_ns - now_unix_nano) / FUTURE_NS
        detail = f"its newest row is {hours:,.0f} h ahead of this clock"
        return fetched._replace(path=None, outcome=PullOutcome.FUTURE, detail=detail)
    return Examined(
        fetched._replace(path=path),
        hashlib.blake2b(data, digest_size=16).digest(),
        first_ns,
        last_ns,
        bank.learned_rows,
        bank.lineages,
        {each: bank.facts(each) for each in bank.configs()},
        any(each not in bank.lineages for each in bank.configs()),
    )


def choose(examined: Sequence[Examined]) -> tuple[list[Examined], list[Fetched]]:
    """Those that share no rows, in the order to add them; the others with the reason."""
    ledger = LineageLedger()
    taken: list[Examined] = []
    refused: list[Fetched] = []
    digests: dict[bytes, str] = {}
    for each in sorted(examined, key=lambda e: (-e.last_ns, -e.rows, e.digest, e.fetched.place.name)):
        place = each.fetched.place
        try:
            if each.digest in digests:
                raise StateError(f"{place.name}: the same state as {digests[each.digest]}")
            ledger.admit(place.name, each.lineages)
        except StateError as error:
            detail = str(error).removeprefix(f"{place.name}: ")
            refused.append(each.fetched._replace(path=None, outcome=PullOutcome.SAME_ENGINE, detail=detail))
            continue
        digests[each.digest] = place.name
        taken.append(each)
    return sorted(taken, key=lambda e: (e.first_ns, e.last_ns, e.digest)), refused


def add(chosen: Sequence[Examined], config: Config) -> Bank:
    """The sum of chosen states; StateError if two of one name have other columns."""
    merged = Bank(config)
    for each in chosen:
        if each.fetched.path is not None:
            part = Bank(config)
            part.restore(each.fetched.path.read_bytes())
            merged.merge(part)
    return merged
