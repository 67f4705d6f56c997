"""The learning core on a recording whose truth is known; what is published of the others is held by the wall."""

import pytest

from collector.commands.replay import replay
from collector.config.schema import Config
from online.snapshot import Snapshot
from tests.support.paths import DATA


def test_known_coefficients_are_recovered(tmp_path):
    """The asynchronous scheduler over a stand-in: 7 ms and 63 us of loop, 45 us/token, 0.12 and 160 us/request."""
    out = tmp_path / "snapshot.json"
    recording = DATA / "c7_async_sim" / "otlp.pb.gz"
    assert replay([recording], out, Config(learners=("rls",))) == 0
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
