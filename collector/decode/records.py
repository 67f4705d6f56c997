"""What decoding yields: step columns, snapshot columns and request records; past this, nobody touches protobuf.

Times are int64 nanoseconds (CLOCK_MONOTONIC of the serving host unless a name says unix). An optional integer that was
not sent is MISSING; an optional double, NaN.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from . import vocabulary as words
from .vocabulary import MISSING, SpanEventKind


def _dtype(table: Mapping[str, words.Field], *more: tuple[str, str]) -> np.dtype[np.void]:
    return np.dtype([*((field.name, "i8") for field in table.values()), *more])


STEP_DTYPE = _dtype(words.SUMMARY_FIELDS, ("kv_usage_ratio", "f8"), ("unix_ns", "i8"))
"""One ``step.BATCH_SUMMARY`` each; unix_ns is the event's wall clock."""

SNAPSHOT_DTYPE = _dtype(words.SNAPSHOT_FIELDS)
"""One ``step.REQUEST_SNAPSHOT`` each: what a running request stood at. Request ids are not kept."""

StepColumns = NDArray[np.void]
SnapshotColumns = NDArray[np.void]


class Finish(enum.StrEnum):
    """``finish.status`` of FINISHED; the first two are natural ends."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"
    IGNORED = "ignored"
    ERROR = "error"


class SpanEvent(msgspec.Struct, frozen=True, gc=False):
    """One journey event: the step it names, its time, and the output tokens made so far."""

    kind: SpanEventKind
    step_id: int
    ts_ns: int
    output_tokens: int


class CoreSpan(msgspec.Struct, frozen=True, gc=False):
    """One finished engine-core request (``llm_core``), events in emission order; its id is not kept.

    ``end_unix_ns`` is when its last event was.
    """

    span_id: bytes
    parent_span_id: bytes
    prompt_tokens: int
    events: tuple[SpanEvent, ...]
    finish: Finish | None
    unix_minus_mono_ns: int
    end_unix_ns: int


class ApiSpan(msgspec.Struct, frozen=True, gc=False):
    """One API request of the instrumented fork (``llm_request`` of scope vllm.api); times MISSING when absent."""

    span_id: bytes
    arrived_ns: int
    handoff_ns: int
    first_response_ns: int
    departed_ns: int
    aborted: bool
    samples: int
    model: str
    end_unix_ns: int


class RequestSpan(msgspec.Struct, frozen=True, gc=False):
    """One finished request, as its engine's API server tells it (gen_ai.latency.*).

    ``cached_tokens`` of the prompt were in the prefix cache, MISSING where the span does not say. ``decode_s`` is from
    first to last token, else to the end. Other latencies that were not sent are NaN.
    """

    span_id: bytes
    trace_id: bytes
    arrival_unix_ns: int
    end_unix_ns: int
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    decode_s: float
    model: str
    cached_tokens: int = MISSING
    queue_s: float = math.nan
    prefill_s: float = math.nan


class Telemetry(msgspec.Struct):
    """Telemetry of one resource of one export.

    ``instance`` is the emitting process, ``host`` where it runs (empty if unsaid), ``peer`` the
    address it came from.
    """

    instance: str
    facts: dict[str, str]
    steps: StepColumns = np.empty(0, STEP_DTYPE)
    snapshots: SnapshotColumns = np.empty(0, SNAPSHOT_DTYPE)
    core: list[CoreSpan] = []
    api: list[ApiSpan] = []
    requests: list[RequestSpan] = []
    host: str = ""
    peer: str = ""
    recording: str = ""
    """The file that it is from, in a replay."""
    arrived_unix_ns: int = 0
    """Arrival of the (last) export by the receiver's clock; 0 if unknown, as in a replay."""
    latest_unix_ns: int = words.UNIX_MAX
    """Latest time that its events may bear."""
    too_new_unix_ns: int = 0
    """Newest time that was rejected because it lies ahead of the arrival; 0: none."""
