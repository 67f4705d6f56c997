"""An API process that sends request spans of its own (un-forked vLLM): an emitter beside engines, for requests only."""

from __future__ import annotations

from collector.config import Config
from collector.decode import RequestSpan
from collector.identity import EngineFacts
from collector.join.api_queueing import ApiQueueing
from collector.join.inferred import RequestSequence, Scheduling
from collector.telemetry import Counts, RowDrop, table
from online import EngineSnapshot, Quality, Target

from .emitter import TargetRows


class ApiProcess:
    """Its steps are never heard of: rows come from the occupancy that its request spans rebuild."""

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        self.instance = instance
        self.recording = recording
        self.facts = EngineFacts()
        self.requests = RequestSequence(settings, number)
        self.api_queueing = ApiQueueing()

    @property
    def event_unix_ns(self) -> int:
        """Newest event heard of."""
        return self.requests.event_unix_ns

    @property
    def safe_unix_ns(self) -> int:
        """No row that will come ends before this wall clock time."""
        return self.requests.safe_unix_ns

    @property
    def needed_unix_ns(self) -> int | None:
        """Event time from which on its telemetry is needed for the rows to come; None while there is none."""
        return self.requests.needed_unix_ns

    @property
    def quality(self) -> Quality:
        """Request spans are all it sends."""
        return Quality.REQUESTS

    @property
    def span_share(self) -> float | None:
        """How many of its requests send a span, as far as trace ids tell; None while that is not known."""
        return self.requests.sampling.share

    @property
    def is_sampled(self) -> bool:
        """Whether a part of its requests sends no span."""
        return self.requests.sampling.is_sampled

    @property
    def open_requests(self) -> int:
        """How many requests wait for their counterpart."""
        return self.requests.open_requests

    def add(self, spans: list[RequestSpan]) -> None:
        """Add finished requests to those that wait."""
        for span in spans:
            self.requests.add(span)

    def advance(self, *, flush: bool = False) -> list[TargetRows]:
        """Rows that are final now."""
        rows = [TargetRows(target, rows) for target, rows in self.requests.advance(flush=flush)]
        self.requests.tell_first_tokens(self.api_queueing)
        return rows

    def beside_engines(self, rows: list[TargetRows], configs: int) -> list[TargetRows]:
        """What engines that send their steps leave to learn from requests; of several configurations, nothing."""
        usable = []
        for target_rows in rows:
            if configs > 1:
                self.requests.counts[table.DROPPED_ROWS, RowDrop.WHICH_CONFIG] += len(target_rows.rows)
            elif target_rows.target is Target.STEP_TIME:
                self.requests.counts[table.DROPPED_ROWS, RowDrop.TOLD_BY_STEPS] += len(target_rows.rows)
            else:
                usable.append(target_rows)
        return usable

    def tell_engine(self, queueing: ApiQueueing, engines: float) -> None:
        """Let one of the engines beside it know what its requests waited for.

        ``engines``: for each process like it; each has its part of those in flight, however many processes that met.
        """
        mine = self.api_queueing
        queueing.first_tokens.extend(arrival.among(engines) for arrival in mine.first_tokens)
        queueing.told_waits_us.extend(mine.told_waits_us)
        queueing.told_arrivals.extend(arrival.among(engines) for arrival in mine.told_arrivals)
        mine.first_tokens.clear()
        mine.told_waits_us.clear()
        mine.told_arrivals.clear()

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self.requests.counts = self.requests.counts, Counts()
        return counts

    def snapshot(self) -> EngineSnapshot:
        """It knows no step; that they are scheduled ahead may show in how long first tokens take."""
        first_tokens = self.api_queueing.explained_first_tokens()
        ahead = first_tokens is not None and first_tokens.scheduled_ahead
        scheduling = Scheduling.ASYNC if ahead else Scheduling.UNKNOWN
        return EngineSnapshot(instance=self.instance, scheduling=scheduling.value, last_step=0)
