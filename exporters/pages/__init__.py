"""Requests, responses and pages over HTTP."""

from __future__ import annotations

from .access import protect
from .routing import Request, Response, Route, Routes
from .server import HttpServer, LimitedServer
from .snapshot_pages import JSON, SnapshotDocuments

__all__ = [
    "JSON",
    "HttpServer",
    "LimitedServer",
    "Request",
    "Response",
    "Route",
    "Routes",
    "SnapshotDocuments",
    "protect",
]
