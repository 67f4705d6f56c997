"""Steps without a summary: what runs in them, and how full the cache is, is rebuilt from the requests."""

import pytest

from collector.evaluate.systems import NINE, design
from collector.service.pipeline import make_pipeline
from online.features import build
from online.rows import STEP_FEATURES, Target
from tests.support.models import configuration_of_captures
from tests.support.pipelines import step_rows
from tests.support.recordings import otlp_file


def column(rows, name):
    return rows.raw[:, STEP_FEATURES.index(name)]


@pytest.mark.parametrize("percent", [10, 0])
def test_every_system_learns_the_rows_that_portable_learns(percent):
    facts, rows = step_rows(make_pipeline(configuration_of_captures()), [otlp_file("c1_mixed")], percent)
    learned = {name: len(design(build(name, Target.STEP_TIME, facts), rows)[0]) for name in NINE}
    assert set(learned.values()) == {learned["portable"]}
    assert learned["portable"] > 200
    assert (column(rows, "running") == column(rows, "requests")).mean() > 0.9
