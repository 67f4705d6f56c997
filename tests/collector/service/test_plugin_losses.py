"""What senders lose or send in vain is told by their own names, once."""

import logging

from collector.decode import Export
from collector.telemetry import table
from tests.support.pipelines import new_pipeline
from tests.support.step_exports import attribute
from tests.support.toy_engine import many_jobs, run_engine
from tests.support.toy_spans import STEP_SCOPE, Piece, export_of, step_span

RUN = run_engine(many_jobs(30))


def tell(pipeline, number, *, dropped=0, scope=STEP_SCOPE, instance="engine", **lost):
    """A step span that says how much its plugin has lost so far; what that counts."""
    span = step_span(RUN, 1 + 2 * number, 2 + 2 * number)
    span.end_time_unix_nano += number
    span.dropped_events_count = dropped
    span.attributes.extend(attribute(f"plugin.{reason}", count) for reason, count in {"step_sample": 1, **lost}.items())
    pipeline.process([Export(export_of([Piece(instance, scope, span)]).SerializeToString(), "peer", "grpc", 1)])
    return pipeline.take_counts()


def test_what_a_plugin_lost_is_counted_once_by_its_own_reasons():
    pipeline = new_pipeline()
    for number, lost, new in (
        (1, {"queue_full": 5}, {"queue_full": 5}),
        (
            3,
            {"queue_full": 7, "export_failed": 2, "hook_error": 1},
            {"queue_full": 2, "export_failed": 2, "hook_error": 1},
        ),
        (3, {"queue_full": 7, "export_failed": 2, "hook_error": 1}, {}),  # a repeat
        (2, {"queue_full": 6}, {}),  # what came late says nothing new
        (4, {"queue_full": 3}, {"queue_full": 3}),  # a new process begins at 0
        (5, {"hook_error": 3, "instance": "another"}, {"hook_error": 3}),
    ):
        counts = tell(pipeline, number, dropped=5, **lost)
        assert counts.by_label(table.PLUGIN_LOST) == new
        assert counts[table.SDK_DROPPED_EVENTS] == 0, "a plugin's losses are not those of an SDK"


def test_the_first_scopes_of_foreign_spans_are_named_once(caplog):
    caplog.set_level(logging.INFO)
    pipeline = new_pipeline()
    for number in range(20):
        for _ in range(2):
            tell(pipeline, number, scope=f"n{number:02}" + "x" * 200)
    named = [record.getMessage() for record in caplog.records if "are left out" in record.message]
    assert [line[:20] for line in named] == [f"spans of scope 'n{number:02}x" for number in range(8)]
    assert max(map(len, named)) < 180
