"""An API process that sends request spans of its own (un-forked vLLM), seen as an emitter beside engines."""

from __future__ import annotations

from collector.config import JoinConfig
from collector.identity import Facts
from collector.join.requests import ApiQueueing, RequestSequence
from collector.join.steps import Scheduling
from online import Quality

from .engine import EngineRows


class ApiProcess:
    """What an :class:`~collector.join.engine.Engine` is for steps, for requests only."""

    scheduling = Scheduling.UNKNOWN
    quality = Quality.REQUESTS
    last_step = 0

    def __init__(self, instance: str, recording: str, number: int, settings: JoinConfig) -> None:
        self.instance = instance
        self.recording = recording
        self.facts = Facts()
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
    def open_requests(self) -> int:
        """Requests held."""
        return self.requests.open_requests

    def advance(self, *, flush: bool = False) -> list[EngineRows]:
        """Rows that are final now."""
        return [EngineRows(target, rows) for target, rows in self.requests.advance(flush=flush)]
