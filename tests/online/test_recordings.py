"""The learning core on the bundled recordings of a real server."""

import pytest

from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.tasks import SystemClock
from online.snapshot import Snapshot
from tests.support.paths import DATA


@pytest.fixture(scope="module")
def step_time(tmp_path_factory):
    """Of one recording; the long one is held by the wall."""
    out = tmp_path_factory.mktemp("snapshot") / "snapshot.json"
    recording = DATA / "c1_mixed" / "otlp.pb.gz"
    assert replay([recording], out, Config(learners=("rls",)), SystemClock()) == 0
    (config,) = Snapshot.from_json(out.read_bytes()).configs
    return config.targets["step_time"]


def test_a_machine_that_did_not_change_reports_no_drift(step_time):
    assert step_time.drift.count == 0


def test_the_coefficients_are_those_of_that_machine(step_time):
    found = {f.name: f for f in step_time.models["portable"].features}
    assert 0.45e3 < found["prefill_tokens"].coefficient < 0.75e3
    assert 10e3 < found["intercept"].coefficient < 20e3
    assert found["intercept"].status == found["prefill_tokens"].status == "identified"
    assert all(f.coefficient >= 0.0 for f in found.values())


def test_the_shapes_of_a_cpu_are_predicted_by_their_factors(step_time):
    model = step_time.models["portable"]
    assert model.prediction_error.median_ape < 0.05
    assert model.prediction_error.mape < 0.75 * model.error.mape
    assert {"decode:1", "decode:2", "decode:3", "decode:4"} <= set(step_time.shape_factors)


def test_eighty_per_cent_of_the_ratios_lie_in_a_band_that_holds_one(step_time):
    interval = step_time.interval
    assert interval.p10 < 1.0 < interval.p90
    assert interval.p90 / interval.p10 < 2.0


def test_known_coefficients_are_recovered(tmp_path):
    """The asynchronous scheduler over a stand-in: 7 ms and 63 us of loop, 45 us/token, 0.12 and 160 us/request."""
    out = tmp_path / "snapshot.json"
    recording = DATA / "c7_async_sim" / "otlp.pb.gz"
    assert replay([recording], out, Config(learners=("rls",)), SystemClock()) == 0
    (config,) = Snapshot.from_json(out.read_bytes()).configs
    found = {f.name: f for f in config.targets["step_time"].models["portable"].features}
    truth = {  # value, and how near 5,800 steps of this load can be
        "intercept": (7063.0, 0.03),
        "prefill_tokens": (45.0, 0.03),
        "decode_context_tokens": (0.12, 0.25),
        "requests": (160.0, 0.1),
    }
    for name, (value, within) in truth.items():
        assert found[name].coefficient == pytest.approx(value, rel=within)
        assert found[name].status == "identified"
