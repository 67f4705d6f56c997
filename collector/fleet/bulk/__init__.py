"""Recordings in bulk: cut by engine once, learned engine by engine, here or on a cluster."""

from __future__ import annotations

from .bulk_files import find_bulk_files
from .bulk_replay import WorkDirectory, bank_of, replay_in_bulk
from .local_runner import LocalRunner

__all__ = ["LocalRunner", "WorkDirectory", "bank_of", "find_bulk_files", "replay_in_bulk"]
