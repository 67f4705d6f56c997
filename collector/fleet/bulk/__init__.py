"""Recordings in bulk: cut by engine once, learned engine by engine, here or on a cluster."""

from __future__ import annotations

from .bulk_files import find_bulk_files
from .bulk_replay import Runner, WorkDirectory, bank_of, replay_in_bulk
from .local_runner import LocalRunner
from .ray_runner import RayRunner
from .row_table import check_rows_place

__all__ = [
    "LocalRunner",
    "RayRunner",
    "Runner",
    "WorkDirectory",
    "bank_of",
    "check_rows_place",
    "find_bulk_files",
    "replay_in_bulk",
]
