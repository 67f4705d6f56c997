"""What a restart keeps of the join: who the emitters are, how each engine is read, and up to when its rows left.

No telemetry is in it. What had not become rows is read again, from the log or from whoever sends it once more, and a
row that ends at or before its emitter's mark is not made a second time. A checkpoint is plain data (maps, lists,
numbers, strings), some hundred bytes for each emitter; whatever else it holds is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import reduce
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from collector.config import Config
from collector.identity import Fact, FactSource
from collector.join.api_queueing import ApiQueueing
from collector.join.inferred import ApiProcess, SchedulingVotes, Sums
from collector.join.pages import PageEngine
from online import RowBlock, Target

from .emitter import Emitter, Key, TargetRows
from .engine import Engine
from .passes import PassEngine

MARKS_MAX = 4096
"""Emitters whose marks are kept, also after they made room for others: their telemetry may still be in the log."""

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

Marks = dict[Target, int]
"""By target: until when (wall clock ns) rows were emitted."""


class CheckpointError(ValueError):
    """A checkpoint that this version cannot read; the text says where."""


class RowWatermarks:
    """Until when the rows of each emitter were emitted, and which rows an earlier process emitted already."""

    def __init__(self, restored: Mapping[Key, Marks] | None = None) -> None:
        self._emitted: OrderedDict[Key, Marks] = OrderedDict((key, dict(own)) for key, own in (restored or {}).items())
        self._restored = {key: dict(own) for key, own in self._emitted.items()}

    def record(self, rows: RowBlock, target: Target, engines: Mapping[int, str]) -> None:
        """Rows of a configuration were emitted; ``engines``: the instances whose numbers they bear."""
        for number, instance in engines.items():
            ends_ns = rows.end_ns if len(engines) == 1 else rows.end_ns[rows.engine == number]
            if len(ends_ns):
                marks = self._emitted.setdefault(("", instance), {})
                marks[target] = max(marks.get(target, 0), int(ends_ns.max()))
        while len(self._emitted) > MARKS_MAX:
            self._emitted.popitem(last=False)

    def without_emitted(self, key: Key, rows: list[TargetRows]) -> tuple[list[TargetRows], int]:
        """The rows that no earlier process has emitted, and how many it has."""
        marks = self._restored.get(key)
        if marks is None:
            return rows, 0
        new, before = [], 0
        for target, block in rows:
            stop = int(np.searchsorted(block.end_ns, marks.get(target, 0), side="right"))
            before += stop
            if stop < len(block):
                new.append(TargetRows(target, block.slice(stop, len(block)) if stop else block))
        return new, before

    def forget_restored(self) -> None:
        """What an earlier process learned does not come again: rows of that time are new, the clock was set back."""
        self._restored = {}

    def to_checkpoint(self) -> list[tuple[str, Marks]]:
        """By instance."""
        return [(instance, dict(marks)) for (_, instance), marks in self._emitted.items()]


class Carried(msgspec.Struct):
    """What the telemetry of an engine process carries: by the names of its attributes."""

    has_summaries: bool
    has_journeys: bool
    has_exact_context: bool
    has_done_stamps: bool
    scheduled_tokens_max: Natural
    longest_run_ns: Natural


class Calibration(msgspec.Struct):
    """How an engine process is read: what its telemetry carries, how it schedules, what its steps have taught."""

    votes: SchedulingVotes
    learned: bool
    sums: Sums
    carried: Carried
    warmed_up: bool
    warm_up_spans: list[tuple[Natural, Natural]]
    emitted_to: Natural
    """The step at which the next row begins."""
    unix_ns: Natural
    """When that step began."""
    kv_block_tokens: Annotated[float, msgspec.Meta(ge=0.0, le=1e18)] = 0.0

    @classmethod
    def of(cls, engine: Engine) -> Calibration:
        """Of an engine's newest process."""
        process = engine.newest_process
        warm_up, calibration = process.warm_up, engine.calibration
        return cls(
            votes=process.votes,
            learned=calibration.learned,
            sums=calibration.sums,
            carried=Carried(*(getattr(process, name) for name in Carried.__struct_fields__)),
            warmed_up=warm_up.over,
            warm_up_spans=list(warm_up.spans_unix_ns),
            emitted_to=process.emitted_to or max(process.window.base - 1, 0),
            unix_ns=process.safe_unix_ns,
            kv_block_tokens=calibration.kv_block_tokens,
        )

    def restore(self, engine: Engine) -> None:
        """Begin the engine's process where an earlier one of ours left it."""
        process = engine.newest_process
        warm_up, calibration = process.warm_up, engine.calibration
        process.votes, process.window.base = self.votes, self.emitted_to + 1
        calibration.sums, calibration.learned, calibration.kv_block_tokens = (
            self.sums,
            self.learned,
            self.kv_block_tokens,
        )
        for name, value in msgspec.structs.asdict(self.carried).items():
            setattr(process, name, value)
        process.event_unix_ns = process.first_unix_ns = self.unix_ns
        warm_up.over, warm_up.spans_unix_ns = self.warmed_up, list(self.warm_up_spans)


class EmitterCheckpoint(msgspec.Struct):
    """One emitter.

    ``calibration`` and ``duplicate_of`` are an engine's, ``trace_share`` and ``since_caller`` an API
    process's, ``front_ends`` a page's; ``server`` is whom a page or passes are of.
    """

    kind: Literal["engine", "api_process", "passes", "page"]
    instance: str
    number: Natural
    config_id: str
    facts: dict[str, tuple[FactSource, Fact]]
    queueing: ApiQueueing
    steps_seen: Natural = 0
    calibration: Calibration | None = None
    duplicate_of: str = ""
    trace_share: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    since_caller: Natural = 0
    server: str = ""
    front_ends: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1

    @classmethod
    def of(cls, emitter: Emitter) -> EmitterCheckpoint:
        """What is kept of an emitter."""
        (kind,) = (name for name, (each, _) in _KINDS.items() if each is type(emitter))
        kept = cls(
            kind,
            *(emitter.instance, emitter.number, emitter.config_id, emitter.facts.held()),
            queueing=emitter.api_queueing,
            duplicate_of=emitter.duplicate_of.instance if emitter.duplicate_of is not None else "",
            calibration=Calibration.of(emitter) if isinstance(emitter, Engine) else None,
        )
        for name, path in _KINDS[kind][1].items():
            setattr(kept, name, attrgetter(path)(emitter))
        return kept

    def restore(self, settings: Config) -> Emitter:
        """The emitter as it was, without telemetry; whose double it is is told by its name."""
        kind, paths = _KINDS[self.kind]
        emitter: Emitter = kind(self.instance, "", self.number, settings)
        for name, path in paths.items():
            *parents, attribute = path.split(".")
            setattr(reduce(getattr, parents, emitter), attribute, getattr(self, name))
        emitter.config_id, emitter.api_queueing = self.config_id, self.queueing
        for fact, (source, value) in self.facts.items():
            emitter.facts.learn({fact: value}, source)
        if isinstance(emitter, Engine) and self.calibration is not None:
            self.calibration.restore(emitter)
        return emitter


_KINDS: dict[Any, tuple[Any, dict[str, str]]] = {
    "engine": (Engine, {"steps_seen": "steps_seen"}),
    "api_process": (
        ApiProcess,
        {
            "trace_share": "sampling.share",
            "since_caller": "sampling.since_caller",
        },
    ),
    "passes": (PassEngine, {"server": "server", "steps_seen": "steps_seen"}),
    "page": (PageEngine, {"server": "server", "front_ends": "windows.copies"}),
}
"""What a restart keeps of each kind beside what it keeps of all: where the emitter has it."""


class JoinCheckpoint(msgspec.Struct):
    """The whole join."""

    emitters: list[EmitterCheckpoint]
    emitter_count: Natural
    marks: list[tuple[str, Marks]]

    def to_plain(self) -> dict[str, Any]:
        """Maps, lists, numbers and strings."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @staticmethod
    def from_plain(plain: object) -> JoinCheckpoint:
        """Read it back; CheckpointError for anything else."""
        try:
            return msgspec.convert(plain, JoinCheckpoint)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the join's checkpoint: {error}") from None
