"""Requests, responses and pages over HTTP."""

from __future__ import annotations

from exporters.pages.access import protect
from exporters.pages.ask_pages import AskPages
from exporters.pages.routing import Request, Response, Route, Routes, dispatch
from exporters.pages.snapshot_pages import JSON, STATE, SnapshotDocuments, answer_document, make_document

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
