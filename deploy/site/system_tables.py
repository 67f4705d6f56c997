# ruff: noqa: INP001 - a script of the site's build
"""Write the tables of docs/systems.md as JSON, by name: every column of every system.

The project's own environment runs it, the hook of mkdocs puts the tables where the document names them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from online.features import PORTABLE, SYSTEMS, portable
from online.rows import Target
from tests.support.sheet_cases import MOE, facts_of

FACTS = facts_of(MOE, tensor_parallel_size=2, cpu_offload=True)
TARGETS = (Target.STEP_TIME, Target.QUEUE_WAIT, Target.API_QUEUEING)
HEADER = ("target", "column", "unit", "kind", "definition")


def tables() -> dict[str, str]:
    """By name of the system."""
    systems = {PORTABLE: lambda target, facts: portable(target, facts).columns}
    systems |= {name: system.table for name, system in SYSTEMS.items()}
    return {
        name: _table(
            HEADER,
            (
                (
                    target.value,
                    f"`{each.name}`",
                    f"`{each.unit}`",
                    "live" if each.constant is None else "constant",
                    f"`{each.definition}`",
                )
                for target in TARGETS
                for each in table(target, FACTS)
            ),
        )
        for name, table in systems.items()
    }


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ("---",) * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


if __name__ == "__main__":
    json.dump(tables(), sys.stdout)
