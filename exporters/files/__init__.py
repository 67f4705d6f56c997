"""A snapshot as files that others read."""

from __future__ import annotations

from .blis import ALPHAS, BlisError, blis_coefficients, export
from .blis_render import render_flags, render_yaml
from .snapshot_file import SNAPSHOT_NAME, write_atomically, write_snapshot

__all__ = [
    "ALPHAS",
    "SNAPSHOT_NAME",
    "BlisError",
    "blis_coefficients",
    "export",
    "render_flags",
    "render_yaml",
    "write_atomically",
    "write_snapshot",
]
