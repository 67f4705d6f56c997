"""Every way to lose something, and every other closed set that is counted: one row of a counter per member.

What became of a row (``RowOutcome``) and whose row it is (``Target``) are told by the rooms below.
"""

from __future__ import annotations

import enum
from typing import Final


class RowDrop(enum.StrEnum):
    """An interval that gives no row."""

    IDLE = "idle"
    INCOMPLETE = "incomplete"
    WARM_UP = "warm_up"
    TOO_LONG = "too_long"
    TIME_ORDER = "time_order"
    RESTART = "restart"
    LEARNED_BEFORE = "learned_before"
    """Made again of telemetry that was read again after a restart, and learned by the process before."""
    PREEMPTION = "preemption"
    """Between two scrapes a request was preempted: it computes its tokens again."""
    TOLD_BY_STEPS = "told_by_steps"
    """Made from request spans, where engines send their steps themselves."""
    WHICH_CONFIG = "which_config"
    """Made from request spans beside engines of several configurations."""
    WHICH_SERVER = "which_server"
    """Between pages of several servers behind one address: one's counters less another's."""
    SAMPLED_SPANS = "sampled_spans"
    """Of request spans of which a head sampler keeps a part: the batch that a request ran in cannot be rebuilt."""


class JoinEvent(enum.StrEnum):
    """What the join met besides rows."""

    STEP_MATCHED = "step_matched"
    STEP_MISMATCHED = "step_mismatched"
    STEP_DUPLICATE = "step_duplicate"
    STEP_LATE = "step_late"
    STEP_MISSING = "step_missing"
    """A step id whose summary never came: lost on the way, or left out by a sender that samples."""
    RECORD_MISSING = "record_missing"
    """A record of a forward pass that never came, by the engine's own count: it costs its row only."""
    JOURNEY_LATE = "journey_late"
    JOURNEY_UNSCHEDULED = "journey_unscheduled"
    API_UNMATCHED = "api_unmatched"
    ENGINE_RESTART = "engine_restart"
    ENGINE_CONFLICT = "engine_conflict"
    ENGINE_EVICTED = "engine_evicted"
    ENGINE_REFUSED = "engine_refused"
    """Telemetry of an engine for which there is no place; counted per export."""
    ID_SHARED = "id_shared"
    """Two processes at a time under one ``service.instance.id``: from here on, two engines."""
    DOUBLE_EMITTER = "double_emitter"
    OPEN_REQUESTS_EVICTED = "open_requests_evicted"
    SPECULATIVE_STEP = "speculative_step"
    FACT_CONFLICT = "fact_conflict"


class DiscoveryOutcome(enum.StrEnum):
    """How a question ended."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    REDIRECT = "redirect"
    REFUSED = "refused"
    TOO_LARGE = "too_large"
    UNEXPECTED = "unexpected"


class ScrapeOutcome(enum.StrEnum):
    """How a question for a page of counters ended."""

    TAKEN = "taken"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    REDIRECT = "redirect"
    REFUSED = "refused"
    UNAUTHENTICATED = "unauthenticated"
    UNEXPECTED = "unexpected"
    TOO_LARGE = "too_large"
    TRUNCATED = "truncated"
    NOT_A_PAGE = "not_a_page"
    NOT_A_NUMBER = "not_a_number"
    UNKNOWN_ENGINE = "unknown_engine"
    MISSING_FAMILIES = "missing_families"
    TOO_MANY_ENGINES = "too_many_engines"
    DROPPED = "dropped"
    """Taken, and pushed out by newer pages before anybody learned from it."""


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
    QUEUE_FULL = "queue_full"
    REFUSED = "refused"
    GAVE_UP = "gave_up"
    SHUT_DOWN = "shut_down"


class Outcome(enum.StrEnum):
    """How an export call ended."""

    SUCCESS = "success"
    EMPTY = "empty"
    QUEUE_FULL = "queue_full"
    SHUTTING_DOWN = "shutting_down"
    UNDECODABLE = "undecodable"
    TOO_MANY_SPANS = "too_many_spans"
    TOO_MANY_FIELDS = "too_many_fields"
    MEMORY = "memory"
    LOG_FULL = "log_full"
    LOG_FAILED = "log_failed"
    UNAUTHENTICATED = "unauthenticated"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    INCOMPLETE = "incomplete"
    FAILURE = "failure"


REFUSALS: Final = (
    Outcome.QUEUE_FULL,
    Outcome.SHUTTING_DOWN,
    Outcome.UNDECODABLE,
    Outcome.TOO_MANY_SPANS,
    Outcome.TOO_MANY_FIELDS,
    Outcome.MEMORY,
    Outcome.LOG_FULL,
    Outcome.LOG_FAILED,
)
"""An export that came whole may not enter; its spans are counted by these."""


class Stall(enum.StrEnum):
    """The first stage that lets nothing through."""

    WORKER = "worker"
    DECODE = "decode"
    JOIN = "join"
    LEARNER = "learner"


class Restored(enum.StrEnum):
    """What a process began with."""

    NEWEST = "newest"
    PREVIOUS = "previous"
    EMPTY = "empty"
    COLD = "cold"
    """There were files, and none could be used."""


class Skip(enum.StrEnum):
    """Why a span or an event was left out; each is a counter row."""

    FOREIGN_SCOPE = "foreign_scope"
    """Of no scope that is known, and without any attribute of a request."""
    FOREIGN_SPAN = "foreign_span"
    FOREIGN_EVENT = "foreign_event"
    NOT_A_REQUEST = "not_a_request"
    DUPLICATE = "duplicate"
    LATE = "late"
    MISSING_ATTRIBUTE = "missing_attribute"
    LACKS_E2E = "lacks_e2e"
    """A span has attributes of a request, but no ``gen_ai.latency.e2e``; the next ones are like it."""
    LACKS_FIRST_TOKEN = "lacks_first_token"  # noqa: S105 -- a time
    LACKS_INPUT_TOKENS = "lacks_input_tokens"
    LACKS_OUTPUT_TOKENS = "lacks_output_tokens"
    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    OUT_OF_RANGE = "out_of_range"
    TIME_ORDER = "time_order"
    TOO_MANY_ATTRIBUTES = "too_many_attributes"
    INCONSISTENT = "inconsistent"


class PluginLoss(enum.StrEnum):
    """What the producer plugin in vLLM says it lost, by its own reasons."""

    QUEUE_FULL = "queue_full"
    EXPORT_FAILED = "export_failed"
    HOOK_ERROR = "hook_error"


GPU: Final = "GPU"


class KvSkip(enum.StrEnum):
    """Why a message or an event was left out; each is a counter row."""

    FRAMES = "frames"
    UNDECODABLE = "undecodable"
    OUT_OF_RANGE = "out_of_range"
    FOREIGN_EVENT = "foreign_event"
    DUPLICATE = "duplicate"
    LATE = "late"


class FpmSkip(enum.StrEnum):
    """Why a record of a forward pass was left out; each is a counter row."""

    FRAMES = "frames"
    UNDECODABLE = "undecodable"
    INVALID = "invalid"
    """A key is missing, of another type, or out of its range."""
    VERSION = "version"
    TIMING_SCOPE = "timing_scope"
    """Nobody knows what was timed."""


class Direction(enum.StrEnum):
    """Where KV blocks are moved to."""

    OFFLOAD = "offload"
    RESTORE = "restore"
    REMOTE = "remote"
    OTHER = "other"

    @staticmethod
    def between(source_medium: str, dest_medium: str) -> Direction:
        """The direction of a transfer, seen from the GPU."""
        from_gpu, to_gpu = source_medium == GPU, dest_medium == GPU
        if from_gpu == to_gpu:
            return Direction.OTHER
        return Direction.OFFLOAD if from_gpu else Direction.RESTORE


class Phase(enum.StrEnum):
    """What is said of a transfer, or of blocks that left a tier below the GPU."""

    COMMITTED = "committed"
    INITIATED = "initiated"
    COMPLETED = "completed"
    FAILED = "failed"
    EVICTED = "evicted"


class SequenceEvent(enum.StrEnum):
    """What a publisher's numbers show."""

    GAPS = "gaps"
    MISSING = "missing"
    RESTARTS = "restarts"


class PullOutcome(enum.StrEnum):
    """What became of a source whose state a fleet's coefficients were to be merged from."""

    MERGED = "merged"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    UNAUTHENTICATED = "unauthenticated"
    REFUSED = "refused"
    """Another status, or an answer that is none."""
    NOTHING_YET = "nothing_yet"
    """It has not written a state yet."""
    TOO_LARGE = "too_large"
    UNREADABLE = "unreadable"
    """Damaged, no state, or of a later version."""
    FUTURE = "future"
    """It has rows of a time that has not come: a wrong clock."""
    SAME_ENGINE = "same_engine"
    """Rows of it are in a newer one, too."""
