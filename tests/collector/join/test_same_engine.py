"""Two emitters on one engine are counted once, and the richer one is heard."""

from __future__ import annotations

import dataclasses

import pytest

from collector.telemetry import table
from collector.telemetry.reasons import JoinEvent
from online import RowOutcome
from online.rows import Quality, Target
from tests.support.pipelines import coefficients, only_config, replayed
from tests.support.toy_engine import Run, many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces


@pytest.fixture(scope="module")
def run():
    return run_engine(many_jobs(80))


def plugin_of(run: Run) -> Run:
    """The same steps as the producer plugin tells them: a microsecond later, with exact context, no journeys."""
    later = []
    for summary, context in zip(run.summaries, run.context_tokens, strict=True):
        more = dict(summary)
        more["step.ts_start_ns"] += 1000
        more["batch.context_tokens"] = more["batch.context_tokens_single"] = context
        more["batch.context_tokens_multi"] = more["batch.num_multi_reqs"] = more["batch.multi_tokens"] = 0
        later.append(more)
    return dataclasses.replace(run, summaries=later, jobs=[])


@pytest.mark.parametrize("first", ["fork", "plugin"])
@pytest.mark.parametrize("size", [7, 10_000])
def test_an_engine_with_two_emitters_is_learned_once(run, first, size):
    fork, plugin = pieces(run, instance="fork"), pieces(plugin_of(run), instance="plugin")
    both = (fork + plugin) if first == "fork" else (plugin + fork)
    both.sort(key=lambda piece: piece.span.end_time_unix_nano)
    pipeline = replayed(exports_of(both, size))
    counts = pipeline.take_counts()
    assert counts[table.JOIN_EVENTS, JoinEvent.DUPLICATE_EMITTER] == 1
    config = only_config(pipeline)
    assert [engine.instance for engine in config.engines] == ["plugin"]
    assert config.telemetry == Quality.STEPS_PLUS.label
    rows = sum(counts[table.ROWS, Target.STEP_TIME, outcome] for outcome in RowOutcome)
    assert rows <= len(run.summaries)
    post_decode = [value for key, value in coefficients(pipeline).items() if key[1:] == ("post_decode", "intercept")]
    assert post_decode == [pytest.approx(900, rel=1e-3)]
    assert counts[table.JOIN_EVENTS, JoinEvent.UNMATCHED] == 0


def test_two_engines_that_begin_in_the_same_moment_or_share_too_few_steps_are_two(run):
    apart, few = plugin_of(run), plugin_of(run)
    del few.summaries[19:]
    for late, summary in enumerate(apart.summaries[30:]):
        for stamp in ("step.ts_start_ns", "step.ts_end_ns"):
            summary[stamp] += 100_000 * (late + 1)
    for other in (apart, few):
        pipeline = replayed(exports_of(pieces(run, instance="a") + pieces(other, instance="b")))
        assert pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.DUPLICATE_EMITTER] == 0
        assert len(pipeline.joiner.engines) == 2
