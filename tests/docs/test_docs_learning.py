"""What docs/learning.md states is what the code does."""

import re

import pytest

from collector.config.schema import Config
from online.drift.detectors import DETECTORS, DriftSettings
from online.errors import PrequentialError
from online.level import HALF_LIVES_ROWS, LEVEL_MAX
from online.river import RESIDUAL
from online.river.residual import RESIDUAL_MAX
from online.rls import LearnerSettings, error_bars, robust
from online.rls.identify import FADE_ROWS, IDENTIFIED_ERROR, VIF_MAX
from online.rls.solve import RELATIVE_RIDGE
from online.snapshot import Reason
from online.target import block_pieces
from online.target.target_state import CHAMPION_ADVANTAGE
from tests.support.paths import DOCS

TEXT = (DOCS / "learning.md").read_text(encoding="utf-8")
RLS, DRIFT = LearnerSettings(), DriftSettings()


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"half-life of\s+(\d+) steps", RLS.half_life_steps),
        (r"min\(1, ([\d.]+) s", robust.HUBER),
        (r"The first (\d+) rows are fitted", RLS.start_rows),
        (r"at most (\d+) rows or 8 seconds", Config().bank.block_rows),
        (r"rows or (\d+) seconds of event", Config().bank.block_s),
        (r"(\d+) rows or 1 second until", block_pieces.GROWING_BLOCK_ROWS),
        (r"rows or (\d+) second until", block_pieces.GROWING_NS / 1e9),
        (r"second is 1/(\d+) of", block_pieces.GROWING_SHARE),
        (r"grown \((\d+) rows\)", block_pieces.GROWN_ROWS),
        (r"of requests: (\d+), and", block_pieces.YOUNG_REQUESTS),
        (r"blocks then last (\d+) times", block_pieces.REQUESTS_LONGER),
        (r"in pieces of (\d+) rows", block_pieces.PIECE_ROWS),
        (r"young \((\d+) rows;", block_pieces.YOUNG_ROWS),
        (r"off by more than (\d+) % in their", 100 * block_pieces.EXPECTED_OFF),
        (r"relative ridge\s+of ([\de-]+);", RELATIVE_RIDGE),
        (r"windows\s+of (\d+) rows \[4\]", error_bars.WINDOW_ROWS),
        (r"a lag for every (\d+) windows", error_bars.WINDOWS_PER_LAG),
        (r"remembered \(1 to (\d+)\)", error_bars.LAGS_MAX),
        (r"all of it up to (\d+) rows", FADE_ROWS[0]),
        (r"none from (\d+) on", FADE_ROWS[1]),
        (r"standard error (\d+) % of it", 100 * IDENTIFIED_ERROR),
        (r"`vif` above (\d+)", VIF_MAX),
        (r"half-life (\d+) rows", PrequentialError().half_life_rows),
        (r"Medians of (\d+)\s+go", DRIFT.group),
        (r"Below (\d+) % nothing is a change", 100 * DRIFT.gate),
        (r"lasted for (\d+) rows", DRIFT.trial_rows_min),
        (r"undecided after (\d+) rows", DRIFT.trial_rows_max),
        (r"kept at (\d+) %", 100 * RLS.alarm_keep),
        (r"bounded to (\d+) %, with half-lives", 100 * LEVEL_MAX),
        (r"half-lives of (\d+), \d+ and \d+ rows", HALF_LIVES_ROWS[0]),
        (r"half-lives of \d+, (\d+) and \d+ rows", HALF_LIVES_ROWS[1]),
        (r"half-lives of \d+, \d+ and (\d+) rows", HALF_LIVES_ROWS[2]),
        (r"bounded to (\d+) %, and part", 100 * RESIDUAL_MAX),
        (r"`bank.river_rows_per_s` \((\d+)\) rows", Config().bank.river_rows_per_s),
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


def test_every_reason_of_a_weak_coefficient_is_in_the_table():
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT.partition("| reason |")[2], re.MULTILINE)) == set(Reason)
