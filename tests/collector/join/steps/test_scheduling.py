"""Synchronous or asynchronous, from where end stamps lie; decided once there is enough, then re-checked."""

from __future__ import annotations

import pytest

from tests.support.paths import DATA
from tests.support.pipelines import replayed
from tests.support.recordings import recording


@pytest.mark.parametrize(("name", "mode"), [("c3_preempt", "sync"), ("c7_async_sim", "async")])
def test_the_mode_of_a_recorded_engine_is_found(name, mode):
    pipeline = replayed(recording(DATA / name / "otlp.pb.gz"))
    assert [engine.scheduling for engine in pipeline.snapshot(0, 1).configs[0].engines] == [mode]
