"""One engine of a scraped server, seen as an emitter beside engines that send steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from collector.decode.pages import EngineReading, Meaning
from collector.identity import EngineFacts
from collector.join.api_process import ApiProcess
from collector.join.emitter import TargetRows
from collector.join.engine import Engine
from collector.join.requests import ApiQueueing
from collector.join.steps import Scheduling
from collector.telemetry import Counts, RowDrop, table
from online import EngineSnapshot, Quality, Target
from online.state import saved

from .completeness import Completeness
from .scrape_windows import PageRow, ScrapeWindows, add_waits, page_block


class PageEngine:
    """What an :class:`~collector.join.engine.Engine` is for steps, for counters only."""

    STATE = saved(
        "page_engine",
        instance=str,
        recording=str,
        server=str,
        number=int,
        facts=EngineFacts,
        api_queueing=ApiQueueing,
        windows=ScrapeWindows,
        completeness=Completeness,
        reading_facts=tuple[str, dict[str, int | bool]],
        _rows=list[PageRow],
        fresh=lambda _: PageEngine("", "", 0),
    )

    def __init__(self, instance: str, recording: str, number: int, server: str = "") -> None:
        self.instance = instance
        self.recording = recording
        self.server = server
        self.number = number
        self.facts = EngineFacts()
        self.api_queueing = ApiQueueing()
        self.windows = ScrapeWindows()
        self.completeness = Completeness()
        self.reading_facts: tuple[str, dict[str, int | bool]] = ("", {})
        self._rows: list[PageRow] = []
        self._counts = Counts()

    @property
    def event_unix_ns(self) -> int:
        """When it was last scraped."""
        newest = self.windows.newest
        return newest.unix_ns if newest is not None else 0

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self.event_unix_ns

    @property
    def needed_unix_ns(self) -> int | None:
        """Nobody keeps pages: a window that a restart cuts is lost."""
        return None

    @property
    def quality(self) -> Quality:
        """Pages give rows of the quality ``metrics``."""
        return Quality.METRICS

    @property
    def span_share(self) -> float | None:
        """A page counts everything."""
        return 1.0

    @property
    def open_requests(self) -> int:
        """It knows of no single request."""
        return 0

    def add(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> None:
        """Add one scrape; two clean ones make a window."""
        before = self.windows.newest
        row = self.windows.add(unix_ns, mono_ns, reading)
        newest = self.windows.newest
        if self.windows.turns_left:  # what was counted until it was noticed is of several servers
            self.api_queueing = ApiQueueing()
        elif before is not None and newest is not None:
            add_waits(self.api_queueing, before, newest, self.windows.copies)
        self.completeness.count(unix_ns, reading.values[Meaning.STEPS] / self.windows.copies)
        if row is not None:
            self._rows.append(row)

    def advance(self, *, flush: bool = False) -> list[TargetRows]:  # noqa: ARG002 -- nothing is held back
        """Rows since the last call: they come in order and are final at once."""
        rows, self._rows = self._rows, []
        return [TargetRows(Target.STEP_TIME, page_block(rows, self.number))] if rows else []

    def yield_to(self, emitters: Sequence[Engine | ApiProcess]) -> None:
        """Others tell more of the same engine: no rows, but a yardstick for how much of it arrives."""
        self._counts[table.DROPPED_ROWS, RowDrop.TOLD_BY_STEPS] += len(self._rows)
        self._rows.clear()
        self.completeness.hear(emitters)

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counts()
        for reason, windows in self.windows.drops.items():
            counts[table.DROPPED_ROWS, reason] += windows
        self.windows.drops.clear()
        return counts

    def snapshot(self) -> EngineSnapshot:
        """Its counter of steps; how it schedules does not matter to windows."""
        newest = self.windows.newest
        steps = newest.value(Meaning.STEPS) if newest is not None else 0.0
        last_step = 0 if math.isnan(steps) else int(steps)
        return EngineSnapshot(instance=self.instance, scheduling=Scheduling.UNKNOWN.value, last_step=last_step)
