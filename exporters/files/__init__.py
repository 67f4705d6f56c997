"""A snapshot as files that others read."""

from __future__ import annotations

from exporters.files.blis import ALPHAS, BlisError, blis_coefficients, choose_config, export, warnings_of
from exporters.files.blis_render import render_flags, render_yaml
from exporters.files.blis_trace import TRACE_HEADER, TRACE_TABLE, TracedRequest, render_trace
from exporters.files.snapshot_file import (
    SNAPSHOT_NAME,
    published_generation,
    published_snapshot,
    write_atomically,
    write_snapshot,
)

__all__ = [
    "ALPHAS",
    "SNAPSHOT_NAME",
    "TRACE_HEADER",
    "TRACE_TABLE",
    "BlisError",
    "TracedRequest",
    "blis_coefficients",
    "choose_config",
    "export",
    "published_generation",
    "published_snapshot",
    "render_flags",
    "render_trace",
    "render_yaml",
    "warnings_of",
    "write_atomically",
    "write_snapshot",
]
