"""Scraped counters: windows between scrapes, and the rows they give."""

from __future__ import annotations

from .completeness import Completeness
from .page_engine import PageEngine
from .page_engines import PageEngines, keys_of
from .page_rows import PageRow, page_block
from .scrape_state import Occupancy, Scrape
from .scrape_windows import ScrapeWindows

__all__ = [
    "Completeness",
    "Occupancy",
    "PageEngine",
    "PageEngines",
    "PageRow",
    "Scrape",
    "ScrapeWindows",
    "keys_of",
    "page_block",
]
