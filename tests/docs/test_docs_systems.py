"""docs/systems.md says what the code does."""

import json
import re
import subprocess
import sys

import pytest

from collector.evaluate.command import COLUMNS
from collector.evaluate.protocol import COVER_MIN
from collector.evaluate.systems import NINE
from online.features import SYSTEMS, build
from online.rows import Target
from tests.support.command_lines import every_command, options_of
from tests.support.paths import DOCS, ROOT
from tests.support.sheet_cases import MOE, facts_of

TEXT = (DOCS / "systems.md").read_text()
FACTS = facts_of(MOE, tensor_parallel_size=2, cpu_offload=True)


def test_the_site_fills_in_every_table_that_systems_md_names():
    command = [sys.executable, "deploy/site/system_tables.py"]
    made = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    tables = json.loads(made.stdout)
    named = re.findall(r"<!-- table: (\w+) -->", TEXT)
    assert set(named) == set(tables) == {*NINE}
    for name in NINE:
        assert all(f"| `{column}` |" in tables[name] for column in build(name, Target.STEP_TIME, FACTS).names)
    assert all(
        f"| `{column.name}` |" in tables[name]
        for name, system in SYSTEMS.items()
        for column in system.table(Target.STEP_TIME, FACTS)
    )


def test_all_nine_and_every_column_of_its_table_are_described():
    assert re.findall(r"^### (\w+)$", TEXT, re.MULTILINE) == list(NINE)
    for heading in [*COLUMNS.values()][1:]:
        assert f"| `{heading}` |" in TEXT
    assert f"where they cover\n  {100 * COVER_MIN:.0f} % of that time" in TEXT


@pytest.mark.parametrize("command", ["lab evaluate", "lab donors"])
def test_every_option_is_documented(command):
    for option in options_of(dict(every_command())[command]):
        assert option.opts[-1] in TEXT, option.opts
