"""ForwardPassMetrics: one record for each forward pass, as SGLang and Dynamo publish them.

A record is a map, read by the names of its keys; unknown keys are left out. Over ZMQ it is msgpack behind a topic and
a sequence number (8 bytes, big-endian); in a file it is a JSON object on a line, by itself or as ``event.fpm`` beside
the time at which it was observed, as Dynamo's traces have it. A heartbeat is a record of zeros.

``wall_time`` is either the time of the engine's loop, from output to output, or the time that the GPU was busy with the
pass. These are two targets: the second lacks the gaps that the host makes. ``timing_scope`` in the record says which,
else the configuration of the endpoint does.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from collector.telemetry import Skip
from online import Target

from .vocabulary import NAME_LENGTH_MAX, UNIX_MAX

VERSION: Final = 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_LENGTH_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]
"""Seconds of one pass, which never takes an hour."""
LINE_SIGNATURE: Final = b'"scheduled_requests"'
"""A recorded line holds this key; no line of another kind does."""


class _Scheduled(msgspec.Struct, gc=False):
    num_prefill_requests: _Count
    sum_prefill_tokens: _Count
    num_decode_requests: _Count
    sum_decode_kv_tokens: _Count
    sum_prefill_kv_tokens: _Count = 0


class _Queued(msgspec.Struct, frozen=True, gc=False):
    num_prefill_requests: _Count = 0
    num_decode_requests: _Count = 0


class _Record(msgspec.Struct, gc=False):
    wall_time: _Seconds
    scheduled_requests: _Scheduled
    counter_id: _Count
    queued_requests: _Queued = _Queued()
    version: int = VERSION
    worker_id: _Name = ""
    dp_rank: _Rank = 0
    timing_scope: _Name = ""


class _Observed(msgspec.Struct, gc=False):
    fpm: _Record
    observed_at_unix_ms: Annotated[int, msgspec.Meta(ge=0, le=UNIX_MAX // 10**6)] = 0


class _Line(msgspec.Struct, gc=False):
    """One line of Dynamo's traces."""

    event: _Observed


class ForwardPass(msgspec.Struct, frozen=True, gc=False):
    """What one record says; tokens and requests are those scheduled in the pass.

    Attributes:
        instance: the engine: its worker, and its data-parallel rank where that is not 0.
        counter: the engine's count of its records.
        wall_us: how long the pass took; 0 of a heartbeat.
        decode_context_tokens: tokens of all decoding requests that are in the KV cache.
        prefill_context_tokens: the same, of the requests whose prompts are computed.
        target: ``step_time``, or ``gpu_time`` where only the GPU's share was timed.
        unix_ns: when it came, was observed, or its place in a file; the wire has no time of day.
        source: the endpoint that it came from.
        recording: the file it is from, in a replay.
    """

    instance: str
    counter: int
    wall_us: float
    prefill_requests: int
    prefill_tokens: int
    prefill_context_tokens: int
    decode_requests: int
    decode_context_tokens: int
    waiting: int
    target: Target
    unix_ns: int = 0
    source: str = ""
    recording: str = ""

    @property
    def is_empty(self) -> bool:
        """A heartbeat: the engine has nothing to do."""
        return not self.prefill_requests + self.decode_requests


_SCOPES: Final = {
    "host": Target.STEP_TIME,
    "gpu": Target.GPU_TIME,
    "model_step_cuda": Target.GPU_TIME,
    "execute_model_cuda": Target.GPU_TIME,
}
"""The last two are those of vLLM's own records (vllm#52061): with sampling, and before it was added."""
_MSGPACK: Final = msgspec.msgpack.Decoder(_Record)
_JSON: Final = msgspec.json.Decoder(_Record)
_TRACE_JSON: Final = msgspec.json.Decoder(_Line)
_TRACE_MARK: Final = b'"fpm"'


def read_record(
    body: bytes, unix_ns: int, times: str = "host", instance: str = "", source: str = ""
) -> ForwardPass | Skip:
    """Read the body of one ZMQ message, which came at ``unix_ns`` from the endpoint ``source``.

    ``times`` is what ``wall_time`` is where the record does not say so, ``host`` or ``gpu``; ``instance`` what the
    engine is called, else the record's worker and rank.
    """
    return _read(_MSGPACK, body, times, unix_ns=unix_ns, instance=instance, source=source)


def read_line(line: bytes, recording: str) -> ForwardPass | Skip:
    """Read one line of a file; if it has no time of observation, the reader of the file gives it one."""
    return _read(_TRACE_JSON if _TRACE_MARK in line else _JSON, line, recording=recording)


def _read(
    decoder: msgspec.msgpack.Decoder[_Record] | msgspec.json.Decoder[_Record] | msgspec.json.Decoder[_Line],
    data: bytes,
    times: str = "host",
    *,
    instance: str = "",
    unix_ns: int = 0,
    source: str = "",
    recording: str = "",
) -> ForwardPass | Skip:
    try:
        record = decoder.decode(data)
    except msgspec.ValidationError:
        return Skip.INVALID
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Skip.UNDECODABLE
    if isinstance(record, _Line):
        observed = record.event
        record, unix_ns = observed.fpm, observed.observed_at_unix_ms * 10**6
    target = _SCOPES.get(record.timing_scope or times)
    if record.version != VERSION or target is None:
        return Skip.UNKNOWN_SCOPE
    worker, rank = record.worker_id, record.dp_rank
    now, queued = record.scheduled_requests, record.queued_requests
    return ForwardPass(
        instance or (f"{worker}/dp{rank}" if rank else worker) or source,
        record.counter_id,
        record.wall_time * 1e6,
        now.num_prefill_requests,
        now.sum_prefill_tokens,
        now.sum_prefill_kv_tokens,
        now.num_decode_requests,
        now.sum_decode_kv_tokens,
        queued.num_prefill_requests + queued.num_decode_requests,
        target,
        unix_ns,
        source,
        recording,
    )
