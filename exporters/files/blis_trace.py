"""One's own traffic as BLIS replays it: a TraceV2 header and its table of requests.

BLIS reads 27 columns by their position, and times in whole microseconds since the first arrival. ``deadline_us`` is a
moment, not a duration: a request that its client gave up ends there. Prompts are not in telemetry, so no request is in
a ``prefix_group``: BLIS computes every prompt token, also those that the server found cached.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

TRACE_HEADER, TRACE_TABLE = "trace.yaml", "trace.csv"
COLUMNS = (
    "request_id",
    "client_id",
    "tenant_id",
    "slo_class",
    "session_id",
    "round_index",
    "prefix_group",
    "prefix_length",
    "streaming",
    "input_tokens",
    "output_tokens",
    "text_tokens",
    "image_tokens",
    "audio_tokens",
    "video_tokens",
    "reason_ratio",
    "model",
    "deadline_us",
    "server_input_tokens",
    "arrival_time_us",
    "send_time_us",
    "first_chunk_time_us",
    "last_chunk_time_us",
    "num_chunks",
    "status",
    "error_message",
    "finish_reason",
)
_HEADER = b"trace_version: 2\ntime_unit: microseconds\nmode: real\nwarm_up_requests: 0\n"


class TracedRequest(NamedTuple):
    """A request as the server saw it; wall clock in ns, ``first_token_unix_ns`` None where it had none."""

    arrival_unix_ns: int
    prompt_tokens: int
    output_tokens: int
    first_token_unix_ns: int | None
    end_unix_ns: int
    is_aborted: bool


def render_trace(requests: Sequence[TracedRequest]) -> dict[str, bytes]:
    """Files by name, requests in the order of their arrival; needs at least one."""
    ordered = sorted(requests, key=lambda request: (request.arrival_unix_ns, request.end_unix_ns))
    begin_unix_ns = ordered[0].arrival_unix_ns
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for number, request in enumerate(ordered):
        writer.writerow(_line(number, request, begin_unix_ns))
    return {TRACE_HEADER: _HEADER, TRACE_TABLE: text.getvalue().encode()}


def _line(number: int, request: TracedRequest, begin_unix_ns: int) -> dict[str, object]:
    def at_us(unix_ns: int) -> int:
        return max(unix_ns - begin_unix_ns, 0) // 1000

    arrival_us, end_us = at_us(request.arrival_unix_ns), at_us(request.end_unix_ns)
    return {
        **dict.fromkeys(("round_index", "prefix_length", "image_tokens", "audio_tokens", "video_tokens"), 0),
        "reason_ratio": "0.0",
        "request_id": number,
        "streaming": "true",
        "input_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "text_tokens": request.prompt_tokens,
        "server_input_tokens": request.prompt_tokens,
        "deadline_us": max(end_us, 1) if request.is_aborted else 0,
        "arrival_time_us": arrival_us,
        "send_time_us": arrival_us,
        "first_chunk_time_us": 0 if request.first_token_unix_ns is None else at_us(request.first_token_unix_ns),
        "last_chunk_time_us": end_us,
        "num_chunks": request.output_tokens,
        "status": "timeout" if request.is_aborted else "ok",
        "finish_reason": "abort" if request.is_aborted else "",
    }
