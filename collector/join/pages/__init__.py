"""Scraped counters: windows between scrapes, and the rows they give."""

from __future__ import annotations

from .engines import PageEngine, PageEngines, keys_of

__all__ = [
    "PageEngine",
    "PageEngines",
    "keys_of",
]
