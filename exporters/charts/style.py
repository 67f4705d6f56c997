"""The style of all charts, with the colours of both schemes; print has the light one."""

from __future__ import annotations

from importlib import resources

CHART_STYLE = resources.files(__package__).joinpath("charts.css").read_text(encoding="utf-8")
