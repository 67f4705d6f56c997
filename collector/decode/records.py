"""What decoding yields: step columns, snapshot columns and request records; past this, nobody touches protobuf.

Times are int64 nanoseconds (CLOCK_MONOTONIC of the serving host unless a name says unix). An optional integer that was
not sent is MISSING; an optional double, NaN.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from collector.telemetry import PluginLoss

MISSING = -1
"""Value of an optional integer that was not sent; every valid value is >= 0."""

STEP_DTYPE = np.dtype(
    [
        ("step_id", "i8"),
        ("ts_start_ns", "i8"),
        ("ts_end_ns", "i8"),
        ("duration_us", "i8"),
        ("running", "i8"),
        ("waiting", "i8"),
        ("prefill_requests", "i8"),
        ("decode_requests", "i8"),
        ("scheduled_tokens", "i8"),
        ("prefill_tokens", "i8"),
        ("decode_tokens", "i8"),
        ("finished", "i8"),
        ("preempted", "i8"),
        ("kv_usage_ratio", "f8"),
        ("kv_blocks_total", "i8"),
        ("kv_blocks_free", "i8"),
        ("ts_output_ns", "i8"),
        ("ts_done_ns", "i8"),
        ("context_tokens", "i8"),
        ("context_tokens_single", "i8"),
        ("context_tokens_multi", "i8"),
        ("multi_requests", "i8"),
        ("multi_tokens", "i8"),
        ("attention_pairs", "i8"),
        ("unix_ns", "i8"),
    ]
)
"""One ``step.BATCH_SUMMARY`` each; unix_ns is the event's wall clock. The last eight before it are optional."""

STEP_FIELDS = tuple(STEP_DTYPE.names or ())

SNAPSHOT_DTYPE = np.dtype(
    [("step_id", "i8"), ("computed_tokens", "i8"), ("scheduled_tokens", "i8"), ("output_tokens", "i8")]
)
"""One ``step.REQUEST_SNAPSHOT`` each: what a running request stood at. Request ids are not kept."""

StepColumns = NDArray[np.void]
SnapshotColumns = NDArray[np.void]


def fingerprint(request_id: str) -> str:
    """What is kept of a request id: enough to join a request's journey with its KV events, nothing to read.

    Ids may hold what a client chose (``X-Request-Id``), and the join window is saved with the state.
    """
    return hashlib.blake2b(request_id.encode(errors="replace"), digest_size=8).hexdigest() if request_id else ""


class MarkKind(enum.IntEnum):
    """Kinds of ``journey.*`` events of an engine-core request."""

    QUEUED = 0
    SCHEDULED = 1
    FIRST_TOKEN = 2
    PREEMPTED = 3
    FINISHED = 4


class Finish(enum.StrEnum):
    """``finish.status`` of FINISHED; the first two are natural ends."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"
    IGNORED = "ignored"
    ERROR = "error"


class Record(msgspec.Struct, frozen=True, gc=False):
    """A value: a copy of what holds it copies the reference."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


class Mark(Record, frozen=True, gc=False):
    """One journey event: the step it names, its time, and the output tokens made so far."""

    kind: MarkKind
    step_id: int
    ts_ns: int
    output_tokens: int


class CoreSpan(Record, frozen=True, gc=False):
    """One finished engine-core request (``llm_core``), marks in emission order; ``request`` is its id's fingerprint."""

    span_id: bytes
    parent_span_id: bytes
    trace_id: bytes
    request: str
    prompt_tokens: int
    marks: tuple[Mark, ...]
    finish: Finish | None
    unix_minus_mono_ns: int
    end_unix_ns: int


class ApiSpan(Record, frozen=True, gc=False):
    """One API request of the instrumented fork (``llm_request`` of scope vllm.api); times MISSING when absent."""

    span_id: bytes
    trace_id: bytes
    arrived_ns: int
    handoff_ns: int
    first_response_ns: int
    departed_ns: int
    aborted: bool
    prompt_tokens: int
    samples: int
    model: str
    end_unix_ns: int


class RequestSpan(Record, frozen=True, gc=False):
    """One finished request, as its engine's API server tells it (gen_ai.latency.*).

    ``cached_tokens`` of the prompt were in the prefix cache, MISSING where that is not told. ``decode_s`` is from first
    to last token, else to the end. Other latencies that were not sent are NaN.
    """

    span_id: bytes
    trace_id: bytes
    parent_span_id: bytes
    arrival_unix_ns: int
    end_unix_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token_s: float
    decode_s: float
    queue_s: float
    prefill_s: float
    model: str


_NO_STEPS: StepColumns = np.empty(0, STEP_DTYPE)
_NO_SNAPSHOTS: SnapshotColumns = np.empty(0, SNAPSHOT_DTYPE)


@dataclass(slots=True)
class Telemetry:
    """What one resource of one export said.

    ``instance`` is the emitting process, ``process`` its pid (0 if unsaid) on ``host`` (empty if unsaid), ``peer`` the
    address it came from.
    """

    instance: str
    facts: dict[str, str]
    steps: StepColumns = field(default_factory=lambda: _NO_STEPS)
    snapshots: SnapshotColumns = field(default_factory=lambda: _NO_SNAPSHOTS)
    core: list[CoreSpan] = field(default_factory=list)
    api: list[ApiSpan] = field(default_factory=list)
    requests: list[RequestSpan] = field(default_factory=list)
    plugin_losses: list[tuple[int, dict[PluginLoss, int]]] = field(default_factory=list)
    """Of each step span of the producer plugin: when it ended, and what had been lost until then."""
    process: int = 0
    host: str = ""
    peer: str = ""
    exports: int = 1
    """How many said it together."""
    arrived_unix_ns: int = 0
    """When the (last) export came in, by the receiver's clock; 0 where nobody knows, as in a replay."""
    too_new_unix_ns: int = 0
    """Newest time that was left out because it lies ahead of the arrival; 0: none."""
