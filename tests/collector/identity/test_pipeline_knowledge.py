"""What is known beside the telemetry reaches the models and the snapshot."""

import json

import pytest

import tracefit
from collector.config.load import load
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from collector.service.publish import Publisher
from collector.telemetry.metrics import Metrics
from exporters.what_if import Advisory
from tests.support.clocks import FakeClock
from tests.support.pipelines import fed, new_pipeline, only_config
from tests.support.sheet_cases import GQA


@pytest.fixture
def pipeline(data_dir, tmp_path):
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GQA | {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8}))
    path = tmp_path / "tracefit.yaml"
    rules = [
        {"facts": {"gpu": "L4", "max_num_seqs": 32, "model_config": str(model)}},
        {"match": {"model": "tiny"}, "facts": {"max_num_batched_tokens": 2048}},
        {"match": {"recording": "*c1*"}, "facts": {"max_num_seqs": 16}},
    ]
    path.write_text(json.dumps({"learners": ["rls"], "rules": rules}))
    return fed(make_pipeline(load(path, {})), [data_dir / "c1_mixed" / "otlp.pb.gz"])


def test_physics_is_learned_by_default_where_the_sheets_are_known(pipeline, data_dir):
    config = only_config(pipeline)
    assert config.targets["step_time"].models["physics"].error.median_ape < 0.1
    assert config.cannot_derive == []
    (unknown,) = fed(new_pipeline(), [data_dir / "c1_mixed" / "otlp.pb.gz"]).snapshot(1, 1).configs
    assert unknown.targets["step_time"].models.keys() == {"portable"}
    assert "num_hidden_layers" in unknown.cannot_derive


def test_a_new_configuration_is_predicted_before_its_first_row(pipeline, data_dir, tmp_path):
    """Its first export tells who it is, and its facts what a step costs at least."""
    first = make_pipeline(pipeline._settings)
    export = next(iter(Recording(data_dir / "c1_mixed" / "otlp.pb.gz", print))).item
    assert not first.has_prior_prediction
    first.process([export])
    assert first.learned_rows == 0
    publisher = Publisher(first, Metrics(), FakeClock(), 5.0, Advisory().verdict)
    publisher.tick()
    path = tmp_path / "snapshot.json"
    path.write_bytes(publisher.current().to_json())
    step = tracefit.load(path).config().step_time(requests=4, decode_context_tokens=2000)
    assert 0 < step.low < step.us < step.high
    (config,) = publisher.current().configs
    features = config.targets["step_time"].models["portable"].features
    assert {feature.status for feature in features} == {"prior_only"}


def test_every_fact_stands_with_its_source(pipeline):
    config = only_config(pipeline)
    assert set(config.sources) <= set(config.config)
    sources = {"gpu": "rules", "hidden_size": "model_file", "memory_bandwidth_gb_s": "sheet"}
    # a rule may match what telemetry tells later
    assert (sources | {"max_num_batched_tokens": "rules"}).items() <= config.sources.items()
    assert config.sources["model"] in ("telemetry", "resource")
    assert config.config["max_num_seqs"] == 16, "the later rule"
