"""What BLIS reads: coefficients as flags or as a commented YAML file, and traffic as a TraceV2 header and table.

BLIS reads 27 columns by their position, and times in whole microseconds since the first arrival. ``deadline_us`` is a
moment, not a duration: a request that its client gave up ends there. Prompts are not in telemetry, so no request is in
a ``prefix_group``: BLIS computes every prompt token, also those that the server found cached.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from exporters.wording import printable
from online import ConfigSnapshot, Snapshot

MAX_COMMENT_CHARS = 400


class Coefficients(NamedTuple):
    """What BLIS loads, and what a reader should know about it."""

    alpha: tuple[int, int, int]
    beta: tuple[float, ...]
    kv_us_per_token: float
    doubtful: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...] = ()


def render_flags(coefficients: Coefficients) -> bytes:
    """The flags of ``blis run`` and ``blis replay``: coefficients and the engine's limits, as far as they are known.

    Giving both kinds of coefficients selects the trained-physics backend by itself.
    """
    alpha = ",".join(map(str, coefficients.alpha))
    beta = ",".join(map(_number, coefficients.beta))
    return f"--alpha-coeffs {alpha} --beta-coeffs {beta}{_flags(coefficients)}\n".encode()


def _flags(coefficients: Coefficients) -> str:
    return "".join(f" --{name} {value}" for name, value in coefficients.limits)


def render_yaml(snapshot: Snapshot, config: ConfigSnapshot, coefficients: Coefficients) -> bytes:
    """A file for ``--defaults-filepath``.

    BLIS refuses unknown keys, so everything about the numbers stands in comments.
    """
    facts = (f"{key}: {value}" for key, value in sorted(config.config.items()))
    step = config.targets["step_time"]
    model = step.models["portable"]
    head = [
        f"tracefit {snapshot.tracefit_version}, snapshot generation {snapshot.generation}",
        f"created_unix_nano {snapshot.created_unix_nano}, config {config.config_id}, telemetry {config.telemetry}",
        *facts,
        f"step_time rows {model.rows}, effective rows {model.effective_rows:.1f}",
    ]
    head.append(f"kv_us_per_token {coefficients.kv_us_per_token!r} (BLIS's formula and figures)")
    if model.error is not None:
        error = model.error  # a reader of this file has neither shape factors nor a level
        head.append(
            f"step_time by these coefficients alone: median error {error.median_ape:.4f}, p90 {error.p90_ape:.4f}"
        )
    head.extend((*coefficients.doubtful, *coefficients.notes))
    if coefficients.limits:
        head.append(f"flags that belong to it:{_flags(coefficients)}")
    head.append("pass --model-config-folder and --hardware-config: BLIS looks for them beside this file otherwise")
    lines = [f"# {printable(line, MAX_COMMENT_CHARS)}" for line in head]
    lines += [
        "version: 0.0.1",
        "defaults: {}",
        "workloads: {}",
        "trained_physics_coefficients:",
        f"  alpha_coeffs: [{', '.join(map(str, coefficients.alpha))}]",
        f"  beta_coeffs: [{', '.join(map(_number, coefficients.beta))}]",
    ]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    """Shortest text that reads back as the same number, with the dot that YAML 1.1 readers ask for."""
    text = repr(float(value))
    mantissa, e, exponent = text.partition("e")
    if e and "." not in mantissa:
        return f"{mantissa}.0e{exponent}"
    return "0" if text == "0.0" else text


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
