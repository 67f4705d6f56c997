"""What is known beside the telemetry reaches the models and the snapshot."""

import json

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import tracefit
from collector.config import Config, Rule
from collector.config.load import load
from collector.decode.records import STEP_DTYPE, Telemetry
from collector.identity.knowledge import Knowledge
from collector.join.joiner import Joiner
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from collector.service.publish import Publisher
from collector.telemetry.metrics import Metrics
from tests.support.clocks import FakeClock
from tests.support.pipelines import fed, new_pipeline
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


def test_physics_is_learned_by_default_where_the_sheets_are_known(pipeline):
    (config,) = pipeline.snapshot(1, 1).configs
    models = config.targets["step_time"].models
    assert {"portable", "physics"} <= set(models)
    assert models["physics"].error.median_ape < 0.1
    assert config.cannot_derive == []


def test_a_new_configuration_is_predicted_before_its_first_row(pipeline, data_dir, tmp_path):
    """Its first export tells who it is, and its facts what a step costs at least."""
    first = make_pipeline(pipeline._settings)
    export = next(Recording(data_dir / "c1_mixed" / "otlp.pb.gz", lambda _: None).exports())
    assert not first.foretells
    first.process([export])
    assert first.learned_rows == 0
    publisher = Publisher(first, Metrics(CollectorRegistry()), FakeClock(), 5.0)
    publisher.tick()
    path = tmp_path / "snapshot.json"
    path.write_bytes(publisher.current().to_json())
    step = tracefit.load(path).config().step_time(requests=4, decode_context_tokens=2000)
    assert 0 < step.low < step.us < step.high
    (config,) = publisher.current().configs
    features = config.targets["step_time"].models["portable"].features
    assert {feature.status for feature in features} == {"prior_only"}


def test_every_fact_stands_with_its_source(pipeline):
    (config,) = pipeline.snapshot(1, 1).configs
    assert set(config.sources) <= set(config.config)
    assert config.sources["gpu"] == "rules"
    assert config.sources["hidden_size"] == "model_file"
    assert config.sources["memory_bandwidth_gb_s"] == "sheet"
    assert config.sources["model"] in ("telemetry", "resource")
    assert config.sources["max_num_batched_tokens"] == "rules", "a rule may match what telemetry tells later"
    assert (config.config["max_num_seqs"], config.contradictions) == (16, {}), "the later rule, which is no conflict"


def test_without_knowledge_the_snapshot_says_what_is_missing(data_dir):
    made = fed(new_pipeline(), [data_dir / "c1_mixed" / "otlp.pb.gz"])
    (config,) = made.snapshot(1, 1).configs
    assert "physics" not in config.targets["step_time"].models
    assert "num_hidden_layers" in config.cannot_derive


def test_a_rule_against_the_resource_is_told_beside_it():
    rules = (Rule(facts={"gpu": "A10G"}),)
    joiner = Joiner(Config(), Knowledge(Config(rules=rules)))
    for step in (1, 2, 3):
        steps = np.zeros(1, STEP_DTYPE)
        steps["step_id"], steps["unix_ns"], steps["ts_start_ns"] = step, 10**18 + step, step
        joiner.add(Telemetry(instance="e", facts={"hw.gpu.name": "NVIDIA L4"}, steps=steps))
    engine = joiner.engine_of("e")
    assert engine.facts.get("gpu") == "NVIDIA L4"
    assert engine.facts.contradictions() == {"gpu": "rules: A10G"}
