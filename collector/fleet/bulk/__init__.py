"""Recordings in bulk: cut by engine once, learned engine by engine, here or on a cluster."""

from __future__ import annotations

from .bulk_replay import Runner, WorkDirectory, bank_of, replay_in_bulk
from .learn import check_rows_place
from .runners import LocalRunner, RayRunner
from .shards import find_bulk_files

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
