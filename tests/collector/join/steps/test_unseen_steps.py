"""Steps without a summary: what runs in them, and how full the cache is, is rebuilt from the requests."""

import pytest

from collector.evaluate.systems import NINE, design
from collector.join.rows import WarmUp
from collector.service.pipeline import make_pipeline
from collector.telemetry import Counts
from online.features import build
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.models import configuration_of_captures
from tests.support.pipelines import only_config, replayed, step_rows
from tests.support.recordings import otlp_file
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces


def column(rows, name):
    return rows.raw[:, STEP_FEATURES.index(name)]


@pytest.mark.parametrize("percent", [10, 0])
def test_every_system_learns_the_rows_that_portable_learns(percent):
    facts, rows = step_rows(make_pipeline(configuration_of_captures()), [otlp_file("c1_mixed")], percent)
    learned = {name: len(design(build(name, Target.STEP_TIME, facts), rows)[0]) for name in NINE}
    assert set(learned.values()) == {learned["portable"]}
    assert learned["portable"] > 200
    assert (column(rows, "running") == column(rows, "requests")).mean() > 0.9


SAMPLED = {"keep": lambda step: step % 7 < 2}
JOURNEYS = {"steps": False}


@pytest.mark.parametrize(
    ("sent", "are_cached", "hidden"),
    [({}, True, False), (SAMPLED, False, False), (SAMPLED, True, True), (JOURNEYS, False, True)],
)
def test_where_journeys_tell_of_prompts_their_price_is_weak_unless_steps_show_that_all_was_computed(
    sent, are_cached, hidden
):
    run = run_engine(many_jobs(300))
    for summary in run.summaries if are_cached else ():
        cached = summary["batch.prefill_tokens"] // 2
        summary["batch.prefill_tokens"] -= cached
        summary["batch.scheduled_tokens"] -= cached
    config = only_config(replayed(exports_of(pieces(run, apis=False, **sent))))
    (price,) = (each for each in config.targets["step_time"].models["portable"].features if "prefill" in each.name)
    assert (config.prefix_hits_hidden, price.reason == "hidden_prefix_hits") == (hidden, hidden)


def test_a_warm_up_ends_with_the_telemetry_although_no_row_came_of_it():
    """The requests of its engine wait for it, and have rows of their own."""
    warm_up = WarmUp(rows_min=64)
    warm_up.pass_through([RowBlock.empty(STEP_FEATURES)], Counts(), flush=True)
    assert warm_up.over
