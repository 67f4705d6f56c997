"""The style of all charts, with the colours of both schemes; print has the light one."""

from __future__ import annotations

from pathlib import Path

CHART_STYLE = Path(__file__).with_name("charts.css").read_text(encoding="utf-8")
