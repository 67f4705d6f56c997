"""A page as the join takes it, and how one stands in a recording.

{"unix_ns": ..., "sent_mono_ns": ..., "got_mono_ns": ..., "page": "..."}     one JSON object a line
"""

from __future__ import annotations

import msgspec

from collector.telemetry import ScrapeOutcome

from .page_text import EngineReading, PageParser

_LINE_MARKS = (b'"unix_ns"', b'"page"')
_KEYS_BYTES = 1024
"""The page is the last and longest key."""
_UNIX_NS_MAX = 1 << 62


class ScrapedPage(msgspec.Struct, frozen=True):
    """What one server said at one time. ``mono_ns`` is when it was asked, by a clock that never jumps."""

    instance: str
    unix_ns: int
    mono_ns: int
    engines: tuple[EngineReading, ...]
    recording: str = ""


class _Line(msgspec.Struct, frozen=True):
    unix_ns: int
    page: str
    sent_mono_ns: int = 0
    url: str = ""


_DECODER = msgspec.json.Decoder(_Line)


def is_page_line(line: bytes) -> bool:
    """Whether a JSON line is a page, by its first keys."""
    head = line[:_KEYS_BYTES]
    return all(mark in head for mark in _LINE_MARKS)


def read_page_line(line: bytes, parser: PageParser, recording: str) -> ScrapedPage | ScrapeOutcome:
    """One line of a recording; recorded pages may lack the newline that a page ends with."""
    try:
        entry = _DECODER.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ScrapeOutcome.NOT_A_PAGE
    if not 0 < entry.unix_ns < _UNIX_NS_MAX:
        return ScrapeOutcome.NOT_A_NUMBER
    page = entry.page.encode("utf-8", "replace")
    readings = parser.parse(page if page.endswith(b"\n") else page + b"\n")
    if isinstance(readings, ScrapeOutcome):
        return readings
    return ScrapedPage(entry.url or recording, entry.unix_ns, entry.sent_mono_ns or entry.unix_ns, readings, recording)
