"""One life of an engine, from its start to its restart: its steps, its warm-up, and the requests that still wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from collector.decode import ApiSpan, CoreSpan
from collector.join.requests import QUEUE_STATE_AGE_NS
from collector.join.steps import StepSequence, WarmUp
from online.state import saved


@dataclass(slots=True)
class PendingRequest:
    """A finished request waiting for its API span and for the frontier to pass it."""

    STATE = saved("pending_request")

    span: CoreSpan
    last_step: int
    queued_unix_ns: int
    start_unix_ns: int
    end_unix_ns: int
    api: ApiSpan | None = None


@dataclass(slots=True)
class EngineProcess:
    """One step sequence with what belongs to it; ``jumped``: its step ids began far ahead of the one before it."""

    STATE = saved("engine_process")

    sequence: StepSequence
    warm_up: WarmUp
    requests: list[PendingRequest] = field(default_factory=list)
    jumped: bool = False

    @property
    def needed_unix_ns(self) -> int:
        """Event time from which on its telemetry is needed for the rows to come."""
        waiting = min((request.queued_unix_ns for request in self.requests), default=self.sequence.safe_unix_ns)
        return min(waiting - QUEUE_STATE_AGE_NS if self.requests else waiting, self.sequence.safe_unix_ns)

    def add_request(self, request: PendingRequest, requests_max: int) -> int:
        """Let a request wait for its rows; how many others were evicted to keep the bound."""
        self.requests.append(request)
        if len(self.requests) <= requests_max:
            return 0
        # a sixteenth at once: sorting for every request that comes would be quadratic
        self.sort_requests()
        evicted = len(self.requests) // 16 + 1
        del self.requests[:evicted]
        return evicted

    def sort_requests(self) -> None:
        """In order of their end; equal ends by span id, so that arrival does not show."""
        self.requests.sort(key=lambda request: (request.end_unix_ns, request.span.span_id))
