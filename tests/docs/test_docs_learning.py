"""What docs/learning.md states is what the code does."""

import re

import pytest

from collector.config.schema import Config
from online.drift import change
from online.drift.change import DETECTORS
from online.errors import PrequentialError
from online.level import HALF_LIVES_ROWS, LEVEL_MAX
from online.river import RESIDUAL
from online.river.residual import RESIDUAL_MAX
from online.rls import LearnerSettings, hac, robust
from online.rls.identify import IDENTIFIED_ERROR
from online.rls.solve import RELATIVE_RIDGE
from online.target.target_state import CHAMPION_ADVANTAGE, YOUNG_BLOCK_ROWS, YOUNG_ROWS
from tests.support.paths import DOCS

TEXT = (DOCS / "learning.md").read_text(encoding="utf-8")
RLS = LearnerSettings()


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"half-life of\s+(\d+) steps", RLS.half_life_steps),
        (r"min\(1, ([\d.]+) s", robust.HUBER),
        (r"The first (\d+) rows are fitted", RLS.start_rows),
        (r"block: (\d+) rows until", YOUNG_BLOCK_ROWS),
        (r"rows until (\d+) are learned", YOUNG_ROWS),
        (r"learned, then (\d+) rows", Config().bank.block_rows),
        (r"or (\d+) second of event time", Config().bank.block_s),
        (r"relative ridge\s+of ([\de-]+);", RELATIVE_RIDGE),
        *zip((r"windows of (\d+),", r"windows of \d+, (\d+) or", r"or (\d+) rows \[4\]"), hac.WINDOW_ROWS, strict=True),
        (r"standard error below (\d+) %", 100 * IDENTIFIED_ERROR),
        (r"half-life (\d+) rows", PrequentialError().half_life_rows),
        (r"Medians of (\d+) rows", change.ROWS),
        (r"in medians of (\d+)\.", change.PREFILL_ROWS),
        (r"slack ([\d.]+) and", change.SLACK),
        (r"and limit (\d+)", change.LIMIT),
        (r"adds at most (\d+),", change.Z_MAX - change.SLACK),
        (r"Below (\d+) % nothing is a change", 100 * change.GATE),
        (r"kept at (\d+) %", 100 * RLS.alarm_keep),
        (r"bounded to (\d+) %, with half-lives", 100 * LEVEL_MAX),
        (r"half-lives of (\d+), \d+ and \d+ rows", HALF_LIVES_ROWS[0]),
        (r"half-lives of \d+, (\d+) and \d+ rows", HALF_LIVES_ROWS[1]),
        (r"half-lives of \d+, \d+ and (\d+) rows", HALF_LIVES_ROWS[2]),
        (r"bounded to (\d+) %, and part", 100 * RESIDUAL_MAX),
        (r"most (\d+) rows per second of event time", Config().bank.river_rows_per_s),
        (r"takes its place where its error is (\d+) %", 100 * (1 - CHAMPION_ADVANTAGE)),
    ],
)
def test_a_number_in_the_document_is_the_one_in_the_code(said, value):
    found = re.search(said, TEXT)
    assert found, said
    assert float(found.group(1)) == pytest.approx(value)


def test_every_status_has_a_line():
    for status in ("identified", "weak", "at_bound", "constant", "prior_only"):
        assert f"| `{status}` |" in TEXT


def test_every_detector_and_the_residual_model_is_named():
    for name in (*DETECTORS[:3], RESIDUAL):
        assert f"`{name}`" in TEXT
