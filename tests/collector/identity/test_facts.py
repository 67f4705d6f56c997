"""Facts: the strongest source wins."""

import json

import pytest

from collector.config import Config, Rule
from collector.config.load import ConfigError, load
from collector.identity.resolver import (
    ConfigResolver,
    EngineFacts,
    FactSource,
    config_id,
)
from online.features.sheets import sheet_of
from tests.support.sheet_cases import DENSE, GQA


def test_the_stronger_source_wins_whichever_came_first():
    for order in ([FactSource.RESOURCE, FactSource.DISCOVERY], [FactSource.DISCOVERY, FactSource.RESOURCE]):
        facts = EngineFacts()
        for source in order:
            facts.learn({"model": source.label}, source)
        assert facts.get("model") == "resource"
        assert facts.sources() == {"model": "resource"}


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GQA))
    return path


def _apply(config, attributes=None):
    facts = EngineFacts()
    ConfigResolver(config).apply(facts, attributes or {}, "pod-1", "")
    return facts


def test_rules_files_and_sheets_complete_what_telemetry_says(model_file):
    rule = Rule(match={"instance": "pod-*"}, facts={"gpu": "NVIDIA L4", "model_config": str(model_file)})
    facts = _apply(Config(rules=(rule,)), {"vllm.tensor_parallel_size": "2"})
    assert (facts.get("num_key_value_heads"), facts.get("memory_bandwidth_gb_s")) == (2, 300.0)
    told = {"tensor_parallel_size": "resource", "gpu": "rules", "hidden_size": "model_file", "sm_count": "sheet"}
    assert told.items() <= facts.sources().items()
    assert sheet_of(facts.as_dict())[1] == ()


def test_quoted_facts_of_a_rule_are_read_as_attributes_are():
    facts = _apply(Config(rules=(Rule(facts={"speculative_decoding": "false", "max_num_seqs": "64", "dtype": "fp8"}),)))
    assert facts.as_dict().items() >= {("speculative_decoding", False), ("max_num_seqs", 64), ("dtype", "fp8")}


def test_the_flags_of_the_server_say_more_than_the_file(model_file):
    config = Config(model_config=str(model_file))
    facts = _apply(config, {"vllm.dtype": "float32", "hw.gpu.name": "A100"})
    assert (facts.get("element_bytes"), facts.get("peak_tflops")) == (4.0, 156.0)
    facts = _apply(config, {"vllm.quantization": "fp8", "hw.gpu.name": "H100"})
    assert (facts.get("weight_element_bytes"), facts.get("peak_tflops")) == (1.0, 1978.9)


def test_what_is_discovered_reaches_live_engines_of_its_pattern_with_their_next_export():
    resolver, engines = ConfigResolver(), [EngineFacts() for _ in range(3)]
    live, other, replayed = engines

    def told():
        names = (("pod-1", ""), ("job-1", ""), ("pod-1", "file.pb.gz"))
        return [resolver.apply(facts, {"vllm.gpu": "L4"}, *name) for facts, name in zip(engines, names, strict=True)]

    assert told() == [True, True, True]
    assert told() == [False, False, False]
    before = config_id(live.identity("pod-1", ""))
    resolver.discovered("pod-*", {"model": "m", "block_size": 16})
    assert told() == [True, False, False]
    assert config_id(live.identity("pod-1", "")) != before
    assert {"block_size": "discovery", "model": "discovery"}.items() <= live.sources().items()
    assert other.as_dict() == replayed.as_dict()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (json.dumps(DENSE | {"num_hidden_layers": -4}).encode(), "num_hidden_layers"),
        (b"[1, 2]", "expected an object"),
    ],
)
def test_a_model_file_that_lies_ends_the_start_with_its_key(tmp_path, content, problem):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"rules\[0\]\.facts\.model_config.*" + problem):
        ConfigResolver(Config(rules=(Rule(facts={"model_config": str(path)}),)))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rules: [{match: {colour: red}}]", "colour"),
        ("rules: [{facts: {colour: red}}]", "colour"),
        ("rules: [{fact: {gpu: L4}}]", r"rules\[0\]\.fact: .*did you mean 'facts'"),
        ("discover: ['ftp://x']", "discover"),
        ("discover: ['http://x/secret?a=b']", "discover"),
    ],
)
def test_bad_configurations_are_refused_by_key(tmp_path, text, key):
    path = tmp_path / "tracefit.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=key):
        ConfigResolver(load(path, {}))
