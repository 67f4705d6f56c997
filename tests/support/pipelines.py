"""Pipelines fed with exports, and what they learned and counted."""

from __future__ import annotations

from collections.abc import Iterable

from collector.config.schema import Config
from collector.ingest.queue import Export
from collector.service.pipeline import Pipeline
from collector.telemetry import Counts, table


def new_pipeline(**settings) -> Pipeline:
    return Pipeline(Config(**settings, learners=("rls",)), "0")


def replayed(exports: Iterable[Export], batch: int = 1, **settings) -> Pipeline:
    pipeline, everything = new_pipeline(**settings), list(exports)
    for start in range(0, len(everything), batch):
        pipeline.process(everything[start : start + batch])
    pipeline.flush()
    return pipeline


def coefficients(pipeline: Pipeline) -> dict[tuple[str, str, str], float]:
    return {
        (config.config_id, name, feature.name): feature.coefficient
        for config in pipeline.snapshot(0, 1).configs
        for name, target in config.targets.items()
        for feature in target.models["portable"].features
    }


def assert_accounted(counts: Counts) -> None:
    """received = accepted + the sum of what was skipped, for spans and for events."""
    assert counts[table.DECODED_SPANS] == counts[table.DECODED_SPANS_OK] + counts.total(table.SKIPPED_SPANS)
    assert counts[table.DECODED_EVENTS] == counts[table.DECODED_EVENTS_OK] + counts.total(table.SKIPPED_EVENTS)
