"""What the documents state of measurements: docs/figures.json, written by the runs that measure, with ``--record``.

``tests/docs/test_docs_figures.py`` compares README.md and the pages under docs/ with it, and with ``UPDATE_GOLDEN=1``
makes their tables anew. Nothing is measured there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tests.support.paths import DOCS

FIGURES = DOCS / "figures.json"


def recorded() -> dict[str, dict[str, Any]]:
    """Every figure by the section of the run that measured it; of a figure with a target ``[figure, target]``."""
    figures: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return figures


def record(section: str, figures: Mapping[str, Any]) -> None:
    """Put a section's figures in the place of those it had, with the day."""
    kept = recorded() if FIGURES.exists() else {}
    kept[section] = {"measured_on": time.strftime("%Y-%m-%d"), **{name: _short(each) for name, each in figures.items()}}
    FIGURES.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _short(figure: Any) -> Any:
    if isinstance(figure, list):
        return [_short(each) for each in figure]
    return float(f"{figure:.4g}") if isinstance(figure, float) else figure
