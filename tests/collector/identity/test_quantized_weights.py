"""Quantized checkpoints have the bytes that they have, or no data sheet and a sentence that says why."""

import json

import pytest

from collector.cli import main
from collector.config.load import load
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from online.snapshot import Snapshot
from tests.support.paths import DATA
from tests.support.sheet_cases import GQA

MODEL = GQA | {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8, "torch_dtype": "bfloat16"}


def _groups(*weights, **more):
    groups = {f"group_{i}": {"weights": each, "targets": ["Linear"]} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


FP8_DYNAMIC = _groups(
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "group_size": None},
    format="float-quantized",
    ignore=["lm_head"],
)
W4A16 = _groups(
    {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 128}, format="pack-quantized"
)
NVFP4 = _groups({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})
MIXED = _groups({"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float", "group_size": 16})
NEWER_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": NVFP4["config_groups"]}
SMOOTH = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


def _replayed(directory, model, beside=None, facts=None):
    """What is published of a server with this config.json, hf_quant_config.json and facts from a rule."""
    files = directory / "model"
    files.mkdir()
    (files / "config.json").write_text(json.dumps(model))
    if beside is not None:
        (files / "hf_quant_config.json").write_text(json.dumps(beside))
    rule = {"facts": {"gpu": "H100", **(facts or {}), "model_config": str(files)}}
    path, out = directory / "tracefit.yaml", directory / "snapshot.json"
    path.write_text(json.dumps({"learners": ["rls"], "rules": [rule]}))
    assert main(["replay", str(DATA / "c1_mixed" / "otlp.pb.gz"), "--config", str(path), "--snapshot", str(out)]) == 0
    (config,) = Snapshot.from_json(out.read_bytes()).configs
    return config


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        (FP8_DYNAMIC, 1.0),
        (W4A16, 0.5),
        (NVFP4, 0.5625),
        (NEWER_MODELOPT, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "mxfp4"}, 0.53125),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else str(value),
)
def test_a_config_json_says_how_many_bytes_a_weight_has(tmp_path, quantization, size):
    config = _replayed(tmp_path, MODEL | {"quantization_config": quantization})
    assert config.config["weight_element_bytes"] == size
    assert config.config["element_bytes"] == 2.0
    assert config.cannot_derive == []
    assert "physics" in config.targets["step_time"].models


def test_checkpoints_of_an_older_compressed_tensors_say_it_under_another_key(tmp_path):
    config = _replayed(tmp_path, MODEL | {"compression_config": FP8_DYNAMIC})
    assert config.config["weight_element_bytes"] == 1.0
    assert config.cannot_derive == []


@pytest.mark.parametrize(("algorithm", "size"), [("FP8", 1.0), ("NVFP4", 0.5625), ("W4A16_AWQ", 0.5)])
def test_a_file_beside_config_json_says_it_where_that_does_not(tmp_path, algorithm, size):
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
    config = _replayed(tmp_path, MODEL, beside)
    assert config.config["weight_element_bytes"] == size
    assert config.cannot_derive == []


def test_a_file_beside_config_json_may_speak_of_the_kv_cache_alone(tmp_path):
    config = _replayed(tmp_path, MODEL, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert config.config["weight_element_bytes"] == 2.0


@pytest.mark.parametrize(
    ("fact", "size"),
    [("fp8", 1.0), ("modelopt", 1.0), ("modelopt_fp4", 0.5625), ("awq_marlin", 0.5), ("gptq", 0.5), ("none", 2.0)],
)
def test_the_engine_says_it_where_no_file_does(tmp_path, fact, size):
    config = _replayed(tmp_path, MODEL, facts={"quantization": fact})
    assert config.config["weight_element_bytes"] == size
    assert config.cannot_derive == []


def test_a_file_says_more_than_the_name_that_the_engine_reports(tmp_path):
    config = _replayed(tmp_path, MODEL | {"quantization_config": W4A16}, facts={"quantization": "compressed-tensors"})
    assert config.config["weight_element_bytes"] == 0.5
    assert config.cannot_derive == []


@pytest.mark.parametrize(
    ("said", "facts", "named"),
    [
        ({"quantization_config": {"quant_method": "quark"}}, {}, "quark"),
        ({"quantization_config": MIXED}, {}, "compressed-tensors"),
        ({"quantization_config": SMOOTH}, {}, "modelopt MIXED_PRECISION"),
        ({}, {"quantization": "compressed-tensors"}, "compressed-tensors"),
        ({}, {"quantization": "torchao"}, "torchao"),
    ],
    ids=["quark", "mixed", "modelopt", "fact", "torchao"],
)
def test_an_unknown_method_gives_no_bound_and_says_so(tmp_path, said, facts, named):
    config = _replayed(tmp_path, MODEL | said, facts=facts)
    assert config.cannot_derive == [f"bytes of a weight (quantization '{named}' is not known here)"]
    models = config.targets["step_time"].models
    assert "physics" not in models
    assert "prior_only" not in {feature.status for feature in models["portable"].features}


def test_half_the_bytes_foretell_half_of_the_time_that_weights_take(tmp_path):
    """Before its first row, by the sheet alone: what is left of the intercept are overheads of layers."""
    export = next(Recording(DATA / "c1_mixed" / "otlp.pb.gz", lambda _: None).exports())
    foretold = {}
    for name, quantization in (("bf16", {}), ("fp8", FP8_DYNAMIC), ("nvfp4", NVFP4)):
        (tmp_path / f"{name}.json").write_text(
            json.dumps(MODEL | {"intermediate_size": 65536, "quantization_config": quantization})
        )
        rule = {"facts": {"gpu": "H100", "model_config": str(tmp_path / f"{name}.json")}}
        (tmp_path / "tracefit.yaml").write_text(json.dumps({"learners": ["rls"], "rules": [rule]}))
        pipeline = make_pipeline(load(tmp_path / "tracefit.yaml", {}))
        pipeline.process([export])
        (config,) = pipeline.snapshot(1, 1).configs
        features = {f.name: f.coefficient for f in config.targets["step_time"].models["portable"].features}
        foretold[name] = features["intercept"]
    weights = 2.0 * (foretold["bf16"] - foretold["fp8"])
    assert weights > 400.0
    assert foretold["bf16"] - foretold["nvfp4"] == pytest.approx(weights * (2.0 - 0.5625) / 2.0, rel=1e-6)


def test_a_file_beside_config_json_that_lies_ends_the_start(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "hf_quant_config.json").write_text("{")
    path = tmp_path / "tracefit.yaml"
    path.write_text(json.dumps({"model_config": str(tmp_path)}))
    assert main(["config", "check", "--config", str(path)]) == 78
    printed = capsys.readouterr()
    assert "hf_quant_config.json" in printed.out + printed.err
