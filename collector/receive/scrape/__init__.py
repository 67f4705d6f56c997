"""Servers' pages of counters, asked for."""

from __future__ import annotations

from .cadence import Cadence
from .page_client import PageClient, ScrapeTarget
from .scraper import Scraper
from .target_list import TargetList, addresses_of, read_targets

__all__ = ["Cadence", "PageClient", "ScrapeTarget", "Scraper", "TargetList", "addresses_of", "read_targets"]
