"""Requests on their way through the engine core: QUEUED, SCHEDULED, FIRST_TOKEN, PREEMPTED, FINISHED.

The instrumented fork's events with its ten attributes, gathered from outside: arrivals and aborts by their methods, the
rest by comparing the scheduler's state after ``schedule()`` and ``update_from_output()``. A journey leaves as one
``llm_core`` span when the request is freed.
"""

from __future__ import annotations

from typing import Any, Final

FINISH: Final = {
    "FINISHED_STOPPED": "stopped",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "aborted",
    "FINISHED_IGNORED": "ignored",
    "FINISHED_ERROR": "error",
    "FINISHED_REPETITION": "stopped",
}
"""Names of vLLM's RequestStatus to the fork's finish.status; 0.20 added REPETITION, a natural end."""

OPEN_MAX: Final = 65_536
"""Journeys followed at a time; requests beyond it have none and are counted."""

EVENTS_MAX: Final = 256
"""Events kept per journey: 125 preemptions. The first ones stay, FINISHED always does."""

Event = tuple[str, int, int, str, int, int, int, int, int, str]
"""Type, monotonic ns, step, phase, prefill done, prompt, outputs, max tokens, preemptions, kind or status."""


class Journey:
    """One open request."""

    __slots__ = ("dropped", "events", "prefill_done", "request", "scheduled")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.events: list[Event] = []
        self.scheduled = False
        self.prefill_done = 0
        self.dropped = 0

    def add(self, kind: str, step: int, ts_ns: int, phase: str = "", extra: str = "") -> None:
        """Append an event with the request's present counts."""
        if len(self.events) >= EVENTS_MAX and kind != "FINISHED":
            self.dropped += 1
            return
        request = self.request
        outputs = request.num_output_tokens
        self.events.append(
            (
                kind,
                ts_ns,
                step,
                phase or ("DECODE" if outputs else "PREFILL"),
                self.prefill_done,
                request.num_prompt_tokens,
                outputs,
                request.max_tokens or 0,
                getattr(request, "num_preemptions", 0),
                extra,
            )
        )


class Finished:
    """A journey that ended, ready to be encoded: no reference to vLLM's objects is left."""

    __slots__ = ("dropped", "events", "offset_ns", "request_id", "trace_headers")

    def __init__(self, request_id: str, journey: Journey, offset_ns: int) -> None:
        self.request_id = request_id
        self.events = journey.events
        self.dropped = journey.dropped
        self.offset_ns = offset_ns
        headers = getattr(journey.request, "trace_headers", None)
        self.trace_headers: dict[str, str] = dict(headers) if headers else {}


class Journeys:
    """The open journeys of one scheduler."""

    def __init__(self) -> None:
        self.open: dict[str, Journey] = {}

    def queued(self, request: Any, step: int, ts_ns: int) -> bool:
        """A request was added; False if it cannot be followed.

        One that is already open continues (a streaming session's next input).
        """
        if request.request_id in self.open:
            return True
        if len(self.open) >= OPEN_MAX:
            return False
        journey = self.open[request.request_id] = Journey(request)
        journey.add("QUEUED", step, ts_ns, phase="WAITING")
        return True

    def scheduled(self, output: Any, step: int, ts_ns: int) -> None:
        """A batch was made: first the preempted, then those that went from waiting to running."""
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            journey = self.open.get(request_id)
            if journey is not None:
                journey.add("PREEMPTED", step, ts_ns)
        # Newer model runners list resumed requests among the new ones: the journey itself knows which it is.
        for new in output.scheduled_new_reqs:
            self._running(new.req_id, step, ts_ns)
        for request_id in getattr(output.scheduled_cached_reqs, "resumed_req_ids", None) or ():
            self._running(request_id, step, ts_ns)

    def _running(self, request_id: str, step: int, ts_ns: int) -> None:
        journey = self.open.get(request_id)
        if journey is not None:
            journey.add("SCHEDULED", step, ts_ns, extra="RESUME" if journey.scheduled else "FIRST")
            journey.scheduled = True

    def computed(self, request_id: str) -> None:
        """Raise the high-water mark of prompt tokens computed; called for requests without an output token."""
        journey = self.open.get(request_id)
        if journey is not None:
            request = journey.request
            done = min(request.num_computed_tokens, request.num_prompt_tokens)
            journey.prefill_done = max(journey.prefill_done, done)

    def first_token(self, request_id: str, step: int, ts_ns: int) -> None:
        """The request has its first output token, so its prompt is done (even if a preemption took it back since)."""
        journey = self.open.get(request_id)
        if journey is not None:
            journey.prefill_done = journey.request.num_prompt_tokens
            journey.add("FIRST_TOKEN", step, ts_ns)

    def finished(self, request_ids: set[str], step: int, ts_ns: int, offset_ns: int) -> list[Finished]:
        """Close the journeys among these requests, freed since the last ``schedule()``; known ones are passed over."""
        done = []
        for request_id in request_ids:
            journey = self.open.pop(request_id, None)
            if journey is not None:
                name = getattr(journey.request.status, "name", "")
                status = FINISH.get(name) or name.rpartition("_")[2].lower()
                journey.add("FINISHED", step, ts_ns, extra=status)
                done.append(Finished(request_id, journey, offset_ns))
        return done
