# ruff: noqa: INP001 - a script of the site's build
"""Write the tables of docs/systems.md as JSON, by name: every column of every system, and what telemetry cannot give.

The project's own environment runs it, the hook of mkdocs puts the tables where the document names them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from online.features.systems import PORTABLE, SYSTEMS
from online.rows import Target
from tests.support.sheet_cases import MOE, facts_of

FACTS = facts_of(MOE, tensor_parallel_size=2, cpu_offload=True)
TARGETS = (Target.STEP_TIME, Target.QUEUE_WAIT, Target.API_QUEUEING)
HEADER = ("target", "column", "unit", "kind", "reference")


def tables() -> dict[str, str]:
    """By name of the system, and ``absent``."""
    made = {
        system.name: _table(
            HEADER,
            (
                (target.value, f"`{each.name}`", f"`{each.unit}`", ("live", "constant")[each.constant], each.reference)
                for target in TARGETS
                for each in system.table(target, FACTS)
            ),
        )
        for system in (PORTABLE, *SYSTEMS)
    }
    missing = ((system.name, what, why) for system in SYSTEMS for what, why in system.absent.items())
    return {**made, "absent": _table(("system", "feature", "why not"), missing)}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ("---",) * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    json.dump(tables(), sys.stdout)
