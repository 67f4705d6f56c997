"""What an admitted export is."""

from __future__ import annotations

from typing import NamedTuple


class Export(NamedTuple):
    """One admitted ExportTraceServiceRequest; ``recording`` names the file in a replay."""

    payload: bytes
    peer: str
    transport: str
    spans: int
    recording: str = ""
    seq: int = 0
    """Number in the journal; 0 = not in it."""
