"""``tracefit lab merge``: several states in, one out; a bad one is named and nothing is written."""

import pytest

from collector.fleet.pull import merge_files
from collector.service.pipeline import make_pipeline
from online.snapshot import Snapshot
from tests.support.fleets import CONFIG, FACTS, state_of


def merged(states, out, **options):
    """Exit code and what was said."""
    report = merge_files(states, out, CONFIG, **options)
    return report.code, [*report.lines, *report.notes]


@pytest.fixture
def kept(tmp_path):
    """States of one sidecar, earlier and later; and of another one."""
    paths = {name: tmp_path / f"{name}.bin" for name in ("early", "late", "other")}
    for name, state in (("early", {}), ("late", {"rows": 900})):
        paths[name].write_bytes(state_of("engine-0", 0, **state))
    paths["other"].write_bytes(state_of("engine-1", 1))
    return paths


@pytest.mark.parametrize("twice", [("late", "late"), ("early", "late")])
def test_a_state_and_itself_or_its_own_past_are_refused_by_name_also_within_a_merged_one(kept, tmp_path, twice):
    first, second = (kept[name] for name in twice)
    out, again = tmp_path / "out.bin", tmp_path / "again.bin"
    for states in ((kept["other"], first, second), (kept["other"], second, first)):
        code, (said,) = merged(states, out)
        assert (code, out.exists()) == (1, False)
        assert f"{first}: engine 'engine-0' of configuration 0f3c52aa9b1e is in {second} too" in said
    assert merged([first, kept["other"]], out)[0] == 0
    code, (said,) = merged([out, second], again)
    assert code == 1
    assert str(out) in said


def test_a_replica_that_is_slower_is_named_and_in_the_snapshot(tmp_path):
    paths = [tmp_path / "fast.bin", tmp_path / "slow.bin"]
    for path, gain in zip(paths, (1.0, 1.6), strict=True):
        path.write_bytes(state_of(path.stem, 3, gain=gain, config_id="0f3c"))
    code, said = merged(paths, tmp_path / "fleet.bin", snapshot=tmp_path / "fleet.json")
    assert code == 0
    warnings = [line for line in said if line.startswith("warning: 0f3c step_time: ")]
    assert ["engine 'slow' takes 1.6" in warnings[0], "engine 'fast' takes 0.62" in warnings[1]] == [True, True]
    assert "of two either may be the odd one" in warnings[0]
    found = Snapshot.from_json((tmp_path / "fleet.json").read_bytes())
    (known,) = found.configs
    assert [replica.engine for replica in known.targets["step_time"].replicas] == ["slow", "fast"]
    assert known.telemetry == "merged"
    assert found.created_unix_nano > 1_700_000_000_000_000_000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"tracefit?", "state.bin: not a state file"), (make_pipeline(CONFIG).state(), "nothing to merge: no row")],
    ids=["corrupt", "nothing learned"],
)
def test_a_state_that_cannot_be_used_is_said_and_nothing_is_written(tmp_path, content, sentence):
    (tmp_path / "state.bin").write_bytes(content)
    code, said = merged([tmp_path / "state.bin"], tmp_path / "fleet.bin")
    assert (code, (tmp_path / "fleet.bin").exists()) == (1, False)
    assert sentence in said[0]


def test_states_whose_models_have_other_columns_are_said_and_nothing_is_written(kept, tmp_path):
    experts = {**FACTS, "num_experts": 8, "num_experts_per_tok": 2}
    kept["other"].write_bytes(state_of("engine-1", 1, facts=experts))
    code, (said,) = merged([kept["early"], kept["other"]], tmp_path / "fleet.bin")
    assert (code, (tmp_path / "fleet.bin").exists()) == (1, False)
    assert "cannot be merged" in said
