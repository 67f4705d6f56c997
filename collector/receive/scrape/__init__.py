"""Servers' pages of counters, asked for."""

from __future__ import annotations

from .cadence import Cadence
from .page_client import PageClient, ScrapeTarget
from .scraper import Scraper
from .target_list import TargetList, read_targets

__all__ = ["Cadence", "PageClient", "ScrapeTarget", "Scraper", "TargetList", "read_targets"]
