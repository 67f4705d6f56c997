"""Requests, responses and pages over HTTP."""

from __future__ import annotations

from .access import protect
from .ask_pages import AskPages
from .routing import Request, Response, Route, Routes, dispatch
from .snapshot_pages import JSON, SnapshotDocuments

__all__ = [
    "JSON",
    "AskPages",
    "Request",
    "Response",
    "Route",
    "Routes",
    "SnapshotDocuments",
    "dispatch",
    "protect",
]
