"""docs/learning.md states the constants, statuses, reasons and names that the code has."""

import re

import pytest

from collector.config.schema import Config
from exporters.wording import STATUS
from online import change
from online.change import DETECTORS
from online.constants import ALARM_KEEP, FEW_ROWS, HALF_LIFE_STEPS, NOISE_ROWS
from online.level import HALF_LIVES_ROWS
from online.rls import IDENTIFIED_ERROR, VIF_MAX
from online.snapshot import Reason
from online.target import RESIDUAL
from online.target.target_state import YOUNG_ROWS
from tests.support.paths import DOCS

TEXT = (DOCS / "learning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"count half after (\d+) steps", HALF_LIFE_STEPS),
        (r"what the last (\d+) to \d+ rows", HALF_LIVES_ROWS[0]),
        (r"what the last \d+ to (\d+) rows", HALF_LIVES_ROWS[-1]),
        (r"block: (\d+) rows until", NOISE_ROWS),
        (r"rows until (\d+) are learned", YOUNG_ROWS),
        (r"learned, then (\d+) rows", Config().block_rows),
        (r"or (\d+) second of event time", Config().block_s),
        (r"2p \+ 2 windows of (\d+) rows", NOISE_ROWS),
        (r"standard error (\d+) % of it", 100 * IDENTIFIED_ERROR),
        (r"`vif` above (\d+)", VIF_MAX),
        (r"Medians of\s+(\d+) rows", NOISE_ROWS),
        (r"in medians of (\d+)\.", FEW_ROWS),
        (r"Below (\d+) % nothing is a change", 100 * change.GATE),
        (r"keeps (\d+) % of its weight", 100 * ALARM_KEEP),
        (r"sees (\d+) rows per second", Config().river_rows_per_s),
    ],
)
def test_a_number_in_the_document_is_the_one_in_the_code(said, value):
    found = re.search(said, TEXT)
    assert found, said
    assert float(found.group(1)) == pytest.approx(value)


def test_every_status_reason_detector_and_the_residual_model_is_named():
    for name in (*STATUS, *DETECTORS, RESIDUAL):
        assert f"`{name}`" in TEXT
    reasons = TEXT.split("<!-- reasons -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", reasons, re.MULTILINE) == [*Reason]
