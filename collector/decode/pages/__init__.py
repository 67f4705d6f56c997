"""Pages of counters: which family means what, and the numbers of one page."""

from __future__ import annotations

from .engine_flavours import Flavour, Meaning
from .page_record import ScrapedPage, is_page_line, read_page_line
from .page_text import PAGE_BYTES_MAX, EngineReading, PageParser

__all__ = [
    "PAGE_BYTES_MAX",
    "EngineReading",
    "Flavour",
    "Meaning",
    "PageParser",
    "ScrapedPage",
    "is_page_line",
    "read_page_line",
]
