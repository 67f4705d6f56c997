"""Every way to lose something, and every other closed set that is counted: one row of a counter per member.

Two members are two things to do: what a user answers with the same sentence is one. What became of a row
(``RowOutcome``) and whose row it is (``Target``) are told by the rooms below.
"""

from __future__ import annotations

import enum
from typing import Final


class RowDrop(enum.StrEnum):
    """An interval that gives no row."""

    IDLE = "idle"
    INCOMPLETE = "incomplete"
    """Part of its work is unknown or was done twice: a step without its batch, a preemption between two pages."""
    WARM_UP = "warm_up"
    TOO_LONG = "too_long"
    TIME_ORDER = "time_order"
    RESTART = "restart"
    LEARNED_BEFORE = "learned_before"
    """Made of telemetry that was read again after a restart, and that the former process had learned."""
    KNOWN_FROM_STEPS = "known_from_steps"
    """Made from request spans or pages, where their engine sends richer telemetry."""
    AMBIGUOUS = "ambiguous"
    """Its engine is unknown: spans beside engines of several configurations, or several servers at one address."""
    SAMPLED_SPANS = "sampled_spans"
    """Of request spans of which a head sampler keeps a part: the batch that a request ran in cannot be rebuilt."""


class JoinEvent(enum.StrEnum):
    """What the join met besides rows."""

    DUPLICATE = "duplicate"
    STEP_LATE = "step_late"
    JOURNEY_LATE = "journey_late"
    """A journey after its steps were learned; it costs no row."""
    MISSING = "missing"
    """A step whose summary or record never came: lost on the way, or left out by a sender that samples."""
    UNMATCHED = "unmatched"
    """A request with one half missing: scheduled in no known step, or sent by the API process alone."""
    STEP_MISMATCHED = "step_mismatched"
    ENGINE_RESTART = "engine_restart"
    ENGINE_CONFLICT = "engine_conflict"
    ENGINE_EVICTED = "engine_evicted"
    DUPLICATE_EMITTER = "duplicate_emitter"
    OPEN_REQUESTS_EVICTED = "open_requests_evicted"


class PullOutcome(enum.StrEnum):
    """Outcome of a request to a server for its page, its facts or its state."""

    READ = "read"
    MERGED = "merged"
    """A state that is in the coefficients of a fleet."""
    UNREACHABLE = "unreachable"
    """No server there, no answer in time, or a broken one."""
    REFUSED = "refused"
    """Another status."""
    UNAUTHENTICATED = "unauthenticated"
    UNEXPECTED = "unexpected"
    """Something else than what was asked for: no page of an engine that is known, a state that is damaged."""
    MISSING_FAMILIES = "missing_families"
    """A page of an engine that is known, without some of the counters that are needed."""
    TOO_LARGE = "too_large"
    DROPPED = "dropped"
    """Scraped, and pushed out of the queue by newer pages."""
    NOTHING_YET = "nothing_yet"
    """It has not written a state yet."""
    SAME_ENGINE = "same_engine"
    """A newer state has some of its rows, too."""


class Transport(enum.StrEnum):
    """How telemetry came in."""

    GRPC = "grpc"
    HTTP = "http"


class Signal(enum.StrEnum):
    """What is telemetry of one kind, in OTLP's words."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


class ForwardOutcome(enum.StrEnum):
    """What became of an export that was to be passed on."""

    SENT = "sent"
    LEFT_OUT = "left_out"
    REFUSED = "refused"
    DROPPED = "dropped"
    """The backend was gone or slow for longer than the queue holds, or until this process ended."""


class Outcome(enum.StrEnum):
    """How an export call ended."""

    ACCEPTED = "accepted"
    QUEUE_FULL = "queue_full"
    SHUTTING_DOWN = "shutting_down"
    MEMORY = "memory"
    LOG = "log"
    """The log is full or cannot be written; readiness says which."""
    UNDECODABLE = "undecodable"
    """No OTLP of a kind that is taken."""
    TOO_LARGE = "too_large"
    """In bytes, spans or fields."""
    UNAUTHENTICATED = "unauthenticated"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


REFUSALS: Final = (Outcome.QUEUE_FULL, Outcome.SHUTTING_DOWN, Outcome.MEMORY, Outcome.LOG)
"""An export that is in order may not enter; its spans are counted by these."""


class Restored(enum.StrEnum):
    """What a process began with."""

    CHECKPOINT = "checkpoint"
    EMPTY = "empty"
    COLD = "cold"
    """There was a checkpoint, and it could not be used."""


class Skip(enum.StrEnum):
    """Why a span, an event, a message or a record was left out."""

    UNKNOWN_SCOPE = "unknown_scope"
    """A scope, kind or version without steps or requests."""
    DUPLICATE = "duplicate"
    LATE = "late"
    MISSING_ATTRIBUTE = "missing_attribute"
    LACKS_E2E = "lacks_e2e"
    """A span has attributes of a request, but no ``gen_ai.latency.e2e``; the next ones are like it."""
    LACKS_FIRST_TOKEN = "lacks_first_token"  # noqa: S105 -- a time
    LACKS_INPUT_TOKENS = "lacks_input_tokens"
    LACKS_OUTPUT_TOKENS = "lacks_output_tokens"
    INVALID = "invalid"
    """A value that cannot be: of another type, not finite, in contradiction to others."""
    OUT_OF_RANGE = "out_of_range"
    UNDECODABLE = "undecodable"
