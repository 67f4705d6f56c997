"""Steps without a summary: what runs in them, and how full the cache is, is rebuilt from the requests."""

import numpy as np
import pytest

from collector.config.schema import Config
from collector.evaluate.systems import NINE, design
from collector.identity import EngineFacts, FactSource
from collector.join.inferred import Habits, Sums
from collector.service.pipeline import Pipeline
from online.features import build
from online.rows import STEP_FEATURES, Target
from tests.support.models import knowledge_of_captures
from tests.support.pipelines import step_rows
from tests.support.recordings import otlp_file


def column(rows, name):
    return rows.raw[:, STEP_FEATURES.index(name)]


@pytest.mark.parametrize("percent", [10, 0])
def test_every_system_learns_the_rows_that_portable_learns(percent):
    pipeline = Pipeline(Config(), "test", knowledge_of_captures())
    facts, rows = step_rows(pipeline, [otlp_file("c1_mixed")], percent)
    learned = {name: len(design(build(name, Target.STEP_TIME, facts), rows)) for name in NINE}
    assert set(learned.values()) == {learned["portable"]}
    assert learned["portable"] > 200
    assert (column(rows, "running") == column(rows, "requests")).mean() > 0.9


def test_the_cache_is_as_full_as_the_contexts_make_it():
    tokens, facts = np.array([0.0, 800.0, 1e9]), EngineFacts()
    assert np.isnan(Habits(facts).usage_by(tokens)).all()
    facts.learn({"block_size": 16, "num_gpu_blocks": 100}, FactSource.RESOURCE)
    assert Habits(facts).usage_by(tokens).tolist() == [0.0, 0.5, 1.0]
    seen = Habits(facts, sums=Sums(context_tokens=1000.0, blocks=70.0, usage=0.25))
    assert seen.usage_by(tokens).tolist() == [0.0, 0.2, 1.0]
