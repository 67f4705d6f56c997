"""Experts of a mixture are counted where they are known; elsewhere nothing of it is usable, and that is said."""

import json

import pytest

import tracefit
from collector.cli import main
from tests.support.paths import DATA
from tests.support.sheet_cases import GQA, MOE

CLAUSE = "mixture of experts, and it is not known how many"


def _replayed(directory, rule):
    """A server whose cost is a line, and whose coefficients are all identified; what is known of it is the rule."""
    directory.mkdir()
    path, out = directory / "tracefit.yaml", directory / "snapshot.json"
    path.write_text(json.dumps({"learners": ["rls"], "rules": [rule]}))
    recording = DATA / "c7_async_sim" / "otlp.pb.gz"
    assert main(["replay", str(recording), "--config", str(path), "--snapshot", str(out)]) == 0
    return out


def _model_file(directory, model):
    path = directory / f"{model['model_type']}.json"
    path.write_text(json.dumps(model))
    return {"facts": {"model_config": str(path)}}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dense")
    return _replayed(directory / "out", _model_file(directory, GQA))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """How many of its experts a token goes through, nobody said."""
    return _replayed(tmp_path_factory.mktemp("mixture") / "out", {"facts": {"num_experts": 8}})


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("counted")
    return _replayed(directory / "out", _model_file(directory, MOE))


def test_where_its_experts_are_known_their_coefficient_carries_to_larger_batches(dense, counted):
    of_dense, config = (tracefit.load(path).config() for path in (dense, counted))
    names = [[each.name for each in one.coefficients()] for one in (of_dense, config)]
    assert names[1] == [*names[0], "active_experts"]
    assert config.usable
    most = _seen(config)
    beyond, dense_beyond = (
        one.step_time(requests=4 * most, decode_context_tokens=400 * most) for one in (config, of_dense)
    )
    # the recorded server has no experts: their coefficient is at its bound, and both say the same
    assert beyond.us == pytest.approx(dense_beyond.us, rel=0.02)
    assert beyond.extrapolated == dense_beyond.extrapolated


def _seen(config):
    return config.targets["step_time"].seen["requests"][1]


def test_a_mixture_of_unknown_experts_is_not_usable(mixture):
    config = tracefit.load(mixture).config()
    assert not config.usable
    assert [CLAUSE in reason for reason in config.reasons] == [True]


def test_the_file_for_blis_says_it(dense, mixture, tmp_path, capsys):
    model = {**GQA, "hidden_size": 512, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(model))
    options = ["--hardware", "H100", "--model-config", str(tmp_path / "config.json")]
    for path, said in ((dense, False), (mixture, True)):
        assert main(["export", str(path), "--format", "blis-yaml", *options]) == 0
        printed = capsys.readouterr()
        assert (CLAUSE in printed.out) is said
        assert (CLAUSE in printed.err) is said
