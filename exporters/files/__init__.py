"""A snapshot as files that others read."""

from __future__ import annotations

from .blis import ALPHAS, BlisError, blis_coefficients, export
from .blis_render import render_flags, render_yaml
from .blis_trace import TRACE_HEADER, TRACE_TABLE, TracedRequest, render_trace
from .coefficients_csv import render_csv
from .dynamo import render_dynamo
from .llm_d_sim import render_llm_d_sim
from .snapshot_file import (
    SNAPSHOT_NAME,
    published_generation,
    published_snapshot,
    write_atomically,
    write_snapshot,
)
from .translation import Assumptions, ExportError, choose_config, doubtful_coefficients, warnings_of

__all__ = [
    "ALPHAS",
    "SNAPSHOT_NAME",
    "TRACE_HEADER",
    "TRACE_TABLE",
    "Assumptions",
    "BlisError",
    "ExportError",
    "TracedRequest",
    "blis_coefficients",
    "choose_config",
    "doubtful_coefficients",
    "export",
    "published_generation",
    "published_snapshot",
    "render_csv",
    "render_dynamo",
    "render_flags",
    "render_llm_d_sim",
    "render_trace",
    "render_yaml",
    "warnings_of",
    "write_atomically",
    "write_snapshot",
]
