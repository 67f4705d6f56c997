"""gRPC reads its sockets in the thread that serves, without threads of its own between.

Its "event engine" hands every piece of a call from thread to thread, and each that was woken looks for more for a while
before it sleeps, which is dear where calls are rare. The core has the older way beside it, behind the name of an
experiment, read when grpc is imported:
https://github.com/grpc/grpc/blob/v1.71.0/src/core/lib/experiments/experiments.yaml. A version that no
longer has that name complains of it on stderr, so it is said to those alone that are known to have it.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
"""Whoever sets it has decided."""
OLDER_WAY: Final = "-event_engine_listener"
NEWEST_KNOWN: Final = (1, 85)
"""The oldest is the oldest that is installed with this project."""


def serve_where_read(environ: MutableMapping[str, str]) -> None:
    """Ask for the older way, before grpc is imported."""
    version = installed_version()
    if version is not None and version <= NEWEST_KNOWN:
        environ.setdefault(VARIABLE, OLDER_WAY)


def installed_version() -> tuple[int, int] | None:
    """Of grpcio, by the name of its folder: to ask ``importlib.metadata`` takes a tenth of a start."""
    spec = find_spec("grpc")
    if spec is None or spec.origin is None:
        return None
    for folder in Path(spec.origin).parents[1].glob("grpcio-*.dist-info"):
        if found := re.match(r"grpcio-(\d+)\.(\d+)\.", folder.name):
            return int(found[1]), int(found[2])
    return None
