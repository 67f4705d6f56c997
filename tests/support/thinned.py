"""A recording as less telemetry would have told it: step rows of a pipeline that was given some of the summaries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from collector.recordings import Recording, TimedExport, merged
from collector.service.pipeline import Pipeline
from online.rows import RowBlock, Target

_MULTIPLIER = 2654435761


def thinned_step_rows(pipeline: Pipeline, path: Path, percent: int) -> tuple[dict, RowBlock]:
    """Facts and step rows where so many in a hundred steps are sampled, always the same ones; nothing is learned."""
    rows: list[RowBlock] = []
    facts: dict = {}
    add = pipeline.joiner.add

    def add_some(telemetry, recording=""):
        mixed = telemetry.steps["step_id"].astype(np.uint64) * np.uint64(_MULTIPLIER) >> np.uint64(16)
        telemetry.steps = telemetry.steps[mixed % np.uint64(100) < percent]
        add(telemetry, recording)

    def take(_config_id, target, block, _engines=None):
        rows.extend([block] if target is Target.STEP_TIME else [])
        return Counter()

    pipeline.joiner.add = add_some
    pipeline._bank.learn = take
    pipeline._bank.describe = lambda _config_id, told: facts.update(told)
    exports = [t.export for t in merged([Recording(path, lambda _: None)]) if isinstance(t, TimedExport)]
    for start in range(0, len(exports), 64):
        pipeline.process(exports[start : start + 64])
    pipeline.flush()
    return facts, RowBlock.concatenate(rows)
