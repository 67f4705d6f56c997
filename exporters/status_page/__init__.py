"""The status page."""

from __future__ import annotations

from .advice import NOTHING_YET, OTLP_PORT, QUALITY, Advice
from .fleet_section import FleetSource
from .remarks_section import Remarks
from .status_page import StatusPage
from .waiting_section import EngineWaiting

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
