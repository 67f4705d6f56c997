"""Publishes immutable snapshots: Prometheus, files, HTTP."""

from __future__ import annotations

from .routes import make_routes

__all__ = [
    "make_routes",
]
