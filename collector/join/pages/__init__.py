"""Scraped counters: windows between scrapes, and the rows they give."""

from __future__ import annotations

from .page_engine import PageEngine
from .page_engines import PageEngines, keys_of
from .scrape_windows import ScrapeWindows

__all__ = [
    "PageEngine",
    "PageEngines",
    "ScrapeWindows",
    "keys_of",
]
