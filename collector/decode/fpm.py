"""ForwardPassMetrics: one record for each forward pass, as SGLang, TensorRT-LLM and Dynamo publish them.

A record is a map, read by the names of its keys; unknown keys are left out. Over ZMQ it is msgpack behind a topic and
a sequence number (8 bytes, big-endian); in a file it is a JSON object on a line. A heartbeat is a record of zeros.

``wall_time`` is either the time of the engine's loop, from output to output, or the time that the GPU was busy with the
pass. These are two targets: the second lacks the gaps that the host makes. ``timing_scope`` in the record says which,
else the configuration of the endpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from collector.telemetry import FpmSkip
from online import Target

VERSION: Final = 1
_SEQUENCE_BYTES: Final = 8
_FRAMES: Final = range(2, 4)
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]
"""No pass takes an hour."""
LINE_MARK: Final = b'"scheduled_requests"'
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
    worker_id: str = ""
    dp_rank: _Rank = 0
    timing_scope: str = ""


class ForwardPass(NamedTuple):
    """What one record says; tokens and requests are those scheduled in the pass.

    Attributes:
        instance: the engine: its worker, and its data-parallel rank where that is not 0.
        counter: the engine's count of its records.
        wall_us: how long the pass took; 0 of a heartbeat.
        decode_context_tokens: tokens of all decoding requests that are in the KV cache.
        prefill_context_tokens: the same, of the requests whose prompts are computed.
        target: ``step_time``, or ``gpu_time`` where only the GPU's share was timed.
        unix_ns: when it came, or its place in a file; the wire has no time of day.
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


_SCOPES: Final = {"host": Target.STEP_TIME, "gpu": Target.GPU_TIME}
_MSGPACK: Final = msgspec.msgpack.Decoder(_Record)
_JSON: Final = msgspec.json.Decoder(_Record)


def read_frames(
    frames: Sequence[bytes], unix_ns: int, times: str = "host", instance: str = "", source: str = ""
) -> ForwardPass | FpmSkip:
    """One ZMQ message.

    Args:
        frames: topic, sequence and record.
        unix_ns: when it came.
        times: what ``wall_time`` is where the record does not say so: ``host`` or ``gpu``.
        instance: what the engine is called; else the record's worker and rank.
        source: the endpoint.
    """
    if len(frames) not in _FRAMES or len(frames[-2]) != _SEQUENCE_BYTES:
        return FpmSkip.FRAMES
    return _read(_MSGPACK, frames[-1], times, unix_ns, instance, source)


def read_line(line: bytes, recording: str) -> ForwardPass | FpmSkip:
    """One line of a file, whose reader gives it a place in event time."""
    return _read(_JSON, line, "host", 0, "", "", recording)


def _read(
    decoder: msgspec.msgpack.Decoder[_Record] | msgspec.json.Decoder[_Record],
    data: bytes,
    times: str,
    unix_ns: int,
    instance: str,
    source: str,
    recording: str = "",
) -> ForwardPass | FpmSkip:
    try:
        record = decoder.decode(data)
    except msgspec.ValidationError:
        return FpmSkip.INVALID
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return FpmSkip.UNDECODABLE
    target = _SCOPES.get(record.timing_scope or times)
    if record.version != VERSION:
        return FpmSkip.VERSION
    if target is None:
        return FpmSkip.TIMING_SCOPE
    if not instance:
        worker, rank = record.worker_id, record.dp_rank
        instance = (f"{worker}/dp{rank}" if rank else worker) or source
    now, queued = record.scheduled_requests, record.queued_requests
    return ForwardPass(
        instance,
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
