"""Servers' pages of counters, asked for."""

from __future__ import annotations

from .cadence import Cadence
from .page_client import ScrapeTarget
from .scraper import Scraper
from .target_list import TargetList, addresses_of, read_targets

__all__ = ["Cadence", "ScrapeTarget", "Scraper", "TargetList", "addresses_of", "read_targets"]
