"""Charts as inline SVG, their style, and numbers as people read them."""

from __future__ import annotations

from .bars import calibration_chart, meter, shares, whisker
from .courses import Z_95, ErrorPoint, Mark, ValuePoint, coefficient_course, error_course
from .row_charts import residuals, scatter
from .speed_change import SpeedChange, name_of, newest_change
from .style import CHART_STYLE
from .svg import nice_limit
from .text import (
    FEATURE_NAMES,
    TARGET_NAMES,
    age,
    coefficient,
    count,
    duration,
    escape,
    factor,
    percent,
    significant,
    unit_text,
)

__all__ = [
    "CHART_STYLE",
    "FEATURE_NAMES",
    "TARGET_NAMES",
    "Z_95",
    "ErrorPoint",
    "Mark",
    "SpeedChange",
    "ValuePoint",
    "age",
    "calibration_chart",
    "coefficient",
    "coefficient_course",
    "count",
    "duration",
    "error_course",
    "escape",
    "factor",
    "meter",
    "name_of",
    "newest_change",
    "nice_limit",
    "percent",
    "residuals",
    "scatter",
    "shares",
    "significant",
    "unit_text",
    "whisker",
]
