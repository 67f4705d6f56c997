"""The status page."""

from __future__ import annotations

from exporters.status_page.advice import NOTHING_YET, OTLP_PORT, QUALITY, Advice
from exporters.status_page.fleet_section import FleetSource
from exporters.status_page.remarks_section import Remarks
from exporters.status_page.status_page import StatusPage
from exporters.status_page.waiting_section import EngineWaiting

__all__ = [
    "NOTHING_YET",
    "OTLP_PORT",
    "QUALITY",
    "Advice",
    "EngineWaiting",
    "FleetSource",
    "Remarks",
    "StatusPage",
]
