"""What a restart keeps of the join: who the emitters are, how each engine is read, and up to when its rows left.

No telemetry is in it. What had not become rows is read again, from the log or from whoever sends it once more, and a
row that ends at or before its emitter's mark is not made a second time. A checkpoint is plain data (maps, lists,
numbers, strings), some hundred bytes for each emitter; what does not fit is refused.

What an emitter is to keep is a field of :class:`EmitterCheckpoint` (of an engine process, of :class:`Calibration`) with
a default, set in its ``of`` and read in its ``restore``. A new kind of emitter has a line in ``_KINDS``, a word in
``kind``, and says in ``needed_unix_ns`` from when on it needs telemetry again, since the log is freed up to there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from collector.config import Config
from collector.identity import Fact, FactSource
from collector.join.api_queueing import ApiQueueing
from collector.join.inferred import ApiProcess, Sums
from collector.join.pages import PageEngine

from .emitter import Emitter, Scheduling
from .engine import Engine
from .events import Watermarks
from .passes import PassEngine

FRONT_ENDS_MAX = 1024
"""A page may count anything."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Up to what a sender may say a time is."""


class Calibration(msgspec.Struct):
    """How an engine process is read: how it schedules, and what its steps have taught."""

    scheduling: Scheduling
    learned: bool
    sums: Sums
    warmed_up: bool
    emitted_step: Natural
    """The step at which the next row begins."""
    unix_ns: Natural
    """When that step began."""
    has_summaries: bool = False
    has_journeys: bool = False
    is_exact: bool = False
    """Whether its steps were told, its journeys, and all of the steps: what its rows are made from."""
    longest_run_ns: Natural = 0
    """Of the requests that ended: others may run for as long that are not heard of."""

    @classmethod
    def of(cls, engine: Engine) -> Calibration:
        """Of an engine's process."""
        process, calibration = engine.process, engine.calibration
        return cls(
            scheduling=process.scheduling,
            learned=calibration.learned,
            sums=calibration.sums,
            warmed_up=process.warm_up.over,
            emitted_step=process.emitted_step or max(process.window.base - 1, 0),
            unix_ns=process.safe_unix_ns,
            has_summaries=process.has_summaries,
            has_journeys=process.has_journeys,
            is_exact=process.is_exact,
            longest_run_ns=process.longest_run_ns,
        )

    def restore(self, engine: Engine) -> None:
        """Begin the engine's process where an earlier one of ours left it."""
        process, calibration = engine.process, engine.calibration
        calibration.sums, calibration.learned = self.sums, self.learned
        process.scheduling, process.window.base = self.scheduling, self.emitted_step + 1
        process.event_unix_ns = process.first_unix_ns = self.unix_ns
        process.warm_up.over = self.warmed_up
        process.has_summaries, process.has_journeys = self.has_summaries, self.has_journeys
        process.is_exact, process.longest_run_ns = self.is_exact, self.longest_run_ns


class EmitterCheckpoint(msgspec.Struct):
    """One emitter.

    ``calibration`` and ``duplicate_of`` are an engine's, ``trace_share`` and ``longest_ns`` an API process's,
    ``front_ends`` a page's, ``times_steps`` of passes; ``server`` is whom a page or passes are of.
    """

    kind: Literal["engine", "api_process", "passes", "page"]
    instance: str
    number: Natural
    config_id: str
    facts: dict[str, tuple[FactSource, Fact]]
    queueing: ApiQueueing
    calibration: Calibration | None = None
    duplicate_of: str = ""
    trace_share: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    longest_ns: Natural = 0
    front_ends: Annotated[int, msgspec.Meta(ge=1, le=FRONT_ENDS_MAX)] = 1
    times_steps: bool = True
    server: str = ""

    @classmethod
    def of(cls, emitter: Emitter) -> EmitterCheckpoint:
        """What is kept of an emitter."""
        kind: Any = next(name for name, each in _KINDS.items() if each is type(emitter))
        named = emitter.instance, emitter.number, emitter.config_id, emitter.facts.sourced_facts()
        kept = cls(kind, *named, emitter.api_queueing, server=emitter.server, times_steps=emitter.times_steps)
        match emitter:
            case Engine():
                kept.calibration = Calibration.of(emitter)
                kept.duplicate_of = emitter.duplicate_of.instance if emitter.duplicate_of is not None else ""
            case ApiProcess():
                kept.trace_share, kept.longest_ns = emitter.sampling.share, emitter.longest_ns
            case PageEngine():
                kept.front_ends = min(emitter.windows.front_ends, FRONT_ENDS_MAX)
        return kept

    def restore(self, settings: Config) -> Emitter:
        """The emitter as it was, without telemetry; whose double it is is told by its name."""
        emitter: Emitter = _KINDS[self.kind](self.instance, "", self.number, settings)
        emitter.config_id, emitter.api_queueing, emitter.server = self.config_id, self.queueing, self.server
        for fact, (source, value) in self.facts.items():
            if source is not FactSource.RULES:  # which the start asks again: it holds as long as the operator says so
                emitter.facts.learn({fact: value}, source)
        emitter.times_steps = self.times_steps
        match emitter:
            case Engine() if self.calibration is not None:
                self.calibration.restore(emitter)
            case ApiProcess():
                emitter.sampling.share_before, emitter.longest_ns = self.trace_share, self.longest_ns
            case PageEngine():
                emitter.windows.front_ends = self.front_ends
        return emitter


_KINDS: dict[str, Any] = {"engine": Engine, "api_process": ApiProcess, "passes": PassEngine, "page": PageEngine}


class JoinCheckpoint(msgspec.Struct):
    """The whole join."""

    emitters: list[EmitterCheckpoint]
    emitter_count: Natural
    marks: list[tuple[str, Watermarks]]
