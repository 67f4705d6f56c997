"""What an admitted export is."""

from __future__ import annotations

from typing import NamedTuple

from collector.decode import ForeignSpans


class Export(NamedTuple):
    """One admitted ExportTraceServiceRequest; ``recording`` names the file in a replay."""

    payload: bytes
    """Without its spans if all are of foreign scopes."""
    peer: str
    transport: str
    spans: int
    recording: str = ""
    seq: int = 0
    """Number in the journal; 0 = not in it."""
    foreign: ForeignSpans = ForeignSpans()
    """Of ``spans``, those that are no longer in the payload."""
    arrived_unix_ns: int = 0
    """When it came in, by the clock here; 0 in a replay, and in a journal of an earlier version: nobody knows."""
