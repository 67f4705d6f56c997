"""Pipelines fed with exports or whole recordings, and what they learned and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import tracefit
from collector.commands.replay import replay
from collector.config import Config, Rule
from collector.decode import Export
from collector.recordings import Recording, by_kind, in_batches, merged
from collector.service.pipeline import Pipeline
from collector.telemetry import Counts, Skip, table
from collector.telemetry.table import Metric
from online import ConfigSnapshot
from online.rows import RowBlock, Target
from online.state import decode, encode

BATCH_BYTES = 1 << 18
_MULTIPLIER = 2654435761
EVERY_REQUEST = {"rules": [Rule(facts={"trace_sampling": 1})]}
"""Said by an operator who knows that every request sends its span."""


def new_pipeline(**settings) -> Pipeline:
    return Pipeline(Config(**{"learners": ("rls",), **settings}))


def replayed(exports: Iterable[Export], batch: int = 1, **settings) -> Pipeline:
    pipeline, everything = new_pipeline(**settings), list(exports)
    for start in range(0, len(everything), batch):
        pipeline.process(everything[start : start + batch])
    pipeline.flush()
    return pipeline


def client_of(recording: Path, directory: Path) -> tracefit.Config:
    """What a client knows after a replay, whose files are in the directory."""
    out = directory / "snapshot.json"
    assert replay([recording], out, Config(learners=("rls",))) == 0
    return tracefit.load(out).configs[0]


def restarted(pipeline: Pipeline, now_unix_ns: int = 0, **settings) -> Pipeline:
    """What goes on from its checkpoint."""
    again = new_pipeline(**settings)
    again.from_checkpoint(decode(encode(pipeline.to_checkpoint()[0])), now_unix_ns)
    return again


def only_config(pipeline: Pipeline) -> ConfigSnapshot:
    """What is published of the one configuration that it knows."""
    (config,) = pipeline.snapshot(0, 1).configs
    return config


def fed(pipeline: Pipeline, paths: Sequence[Path]) -> Pipeline:
    """The pipeline after it was fed whole recordings, as a replay does."""
    for batch in in_batches(merged([Recording(path, print) for path in paths]), BATCH_BYTES):
        pipeline.process(**by_kind(batch) | {"pages": ()})
    pipeline.flush()
    return pipeline


def step_rows(pipeline: Pipeline, paths: Sequence[Path], percent: int = 100) -> tuple[dict, RowBlock]:
    """Facts and step rows of recordings, as the pipeline would learn them; nothing is learned.

    Where ``percent`` is less, so many in a hundred summaries are sampled, always the same ones.
    """
    rows: list[RowBlock] = []
    facts: dict = {}
    add = pipeline.joiner.add

    def add_some(telemetry):
        mixed = telemetry.steps["step_id"].astype(np.uint64) * np.uint64(_MULTIPLIER) >> np.uint64(16)
        telemetry.steps = telemetry.steps[mixed % np.uint64(100) < percent]
        add(telemetry)

    def take(_config_id, target, block, _engines=None):
        rows.extend([block] if target is Target.STEP_TIME else [])
        return Counter()

    pipeline.joiner.add = add_some
    pipeline._bank.learn = take
    pipeline._bank.describe = lambda _config_id, told: facts.update(told)
    fed(pipeline, paths)
    return facts, RowBlock.concatenate(rows)


def coefficients(pipeline: Pipeline) -> dict[tuple[str, str, str], float]:
    return {
        (config.config_id, name, feature.name): feature.coefficient
        for config in pipeline.snapshot(0, 1).configs
        for name, target in config.targets.items()
        for feature in target.models["portable"].features
    }


def step_coefficients(pipeline: Pipeline) -> dict[str, float]:
    """Of step time, where one configuration was learned."""
    return {name: value for (_, target, name), value in coefficients(pipeline).items() if target == "step_time"}


def total_of(counts: Counts, metric: Metric) -> float:
    """The sum over all label values of a metric."""
    return sum(number for row, number in counts.items() if row[0] is metric)


def assert_accounted(counts: Counts, *spans: Span) -> None:
    """Each span that came and each of its events is counted once."""
    assert total_of(counts, table.DECODED_SPANS) == len(spans)
    if not counts[table.DECODED_SPANS, Skip.UNDECODABLE]:  # of those nobody has counted the events
        assert total_of(counts, table.DECODED_EVENTS) == sum(len(span.events) for span in spans)


def by_label(counts, metric):
    """What was counted of a metric with one label, by its value; zeros left out."""
    return {row[1]: number for row, number in counts.items() if row[0] is metric and number}


def value_of(metrics, metric, *labels):
    """What a counter or gauge stands at."""
    values = dict(zip((name for name, _ in metric.labels), labels, strict=True))
    return metrics.registry.get_sample_value(metric.exposed_name, values) or 0.0
