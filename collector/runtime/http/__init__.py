"""HTTP/1.1 from the standard library, bounded; a room of its own, because it costs an import that few need."""

from __future__ import annotations

from .bounded_client import BoundedConnection
from .bounded_server import HttpServer
from .handler import Handler, page_handler

__all__ = [
    "BoundedConnection",
    "Handler",
    "HttpServer",
    "page_handler",
]
