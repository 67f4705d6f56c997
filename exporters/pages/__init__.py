"""Requests, responses and pages over HTTP."""

from __future__ import annotations

from .access import protect
from .ask_pages import AskPages
from .routing import Request, Response, Route, Routes, dispatch
from .snapshot_pages import JSON, STATE, SnapshotDocuments, answer_document, make_document

__all__ = [
    "JSON",
    "STATE",
    "AskPages",
    "Request",
    "Response",
    "Route",
    "Routes",
    "SnapshotDocuments",
    "answer_document",
    "dispatch",
    "make_document",
    "protect",
]
