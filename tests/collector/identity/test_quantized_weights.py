"""Quantized checkpoints have the bytes that they have, or no data sheet and a sentence that says why."""

import json

import pytest

from collector.cli import main
from collector.config import Config, Rule
from collector.identity import ConfigResolver, EngineFacts, cannot_derive
from online.bank import Bank
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


def known(directory, model, beside=None, facts=None):
    """What is known of a server with this config.json, hf_quant_config.json and facts from a rule."""
    (directory / "config.json").write_text(json.dumps(model))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    rule, told = Rule(facts={"gpu": "H100", **(facts or {}), "model_config": str(directory)}), EngineFacts()
    ConfigResolver(Config(rules=(rule,))).apply(told, {}, "e", "")
    return told.known()


def in_config(quantization, key="quantization_config"):
    return MODEL | {key: quantization}, None, {}


def beside_it(algorithm):
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    return MODEL, {"producer": {"name": "modelopt"}, "quantization": quantization}, {}


def by_the_engine(name, model=MODEL):
    return model, None, {"quantization": name}


@pytest.mark.parametrize(
    ("said", "size"),
    [
        (in_config(FP8_DYNAMIC), 1.0),
        (in_config(W4A16), 0.5),
        (in_config(NVFP4), 0.5625),
        (in_config(NEWER_MODELOPT), 0.5625),
        (in_config({"quant_method": "modelopt", "quant_algo": "FP8"}), 1.0),
        (in_config({"quant_method": "awq", "bits": 4, "group_size": 128}), 0.5),
        (in_config({"quant_method": "gptq", "bits": 8}), 1.0),
        (in_config({"quant_method": "bitsandbytes", "load_in_4bit": True}), 0.5),
        (in_config({"quant_method": "mxfp4"}), 0.53125),
        (in_config(FP8_DYNAMIC, "compression_config"), 1.0),
        (beside_it("FP8"), 1.0),
        (beside_it("NVFP4"), 0.5625),
        (beside_it("W4A16_AWQ"), 0.5),
        (beside_it(None), 2.0),
        (by_the_engine("fp8"), 1.0),
        (by_the_engine("modelopt"), 1.0),
        (by_the_engine("modelopt_fp4"), 0.5625),
        (by_the_engine("awq_marlin"), 0.5),
        (by_the_engine("gptq"), 0.5),
        (by_the_engine("none"), 2.0),
        (by_the_engine("compressed-tensors", MODEL | {"quantization_config": W4A16}), 0.5),
    ],
)
def test_a_weight_has_the_bytes_that_config_json_the_file_beside_it_or_the_engine_says(tmp_path, said, size):
    facts = known(tmp_path, *said)
    assert (facts["weight_element_bytes"], facts["element_bytes"]) == (size, 2.0)
    assert cannot_derive(facts) == ()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (in_config({"quant_method": "quark"}), "quark"),
        (in_config(MIXED), "compressed-tensors"),
        (in_config(SMOOTH), "modelopt MIXED_PRECISION"),
        (by_the_engine("compressed-tensors"), "compressed-tensors"),
        (by_the_engine("torchao"), "torchao"),
    ],
)
def test_an_unknown_method_gives_no_bound_and_says_so(tmp_path, said, named):
    facts = known(tmp_path, *said)
    assert cannot_derive(facts) == (f"bytes of a weight (quantization '{named}' is not known here)",)
    assert prior_prediction(facts) is None


def prior_prediction(facts):
    """The intercept before the first row, by the sheet alone; None without one."""
    bank = Bank(Config(learners=("rls",)))
    bank.describe("c", facts)
    target = bank.targets("c").get("step_time")
    return None if target is None else target.models["portable"].features[0].coefficient


def test_half_the_bytes_foretell_half_of_the_time_that_weights_take(tmp_path):
    """What is left of the intercept are overheads of layers."""
    wide = MODEL | {"intermediate_size": 65536}
    bf16, fp8, nvfp4 = (
        prior_prediction(known(tmp_path, wide | {"quantization_config": quantization}))
        for quantization in ({}, FP8_DYNAMIC, NVFP4)
    )
    weights = 2.0 * (bf16 - fp8)
    assert weights > 400.0
    assert bf16 - nvfp4 == pytest.approx(weights * (2.0 - 0.5625) / 2.0, rel=1e-6)


def test_a_file_beside_config_json_that_lies_ends_the_start(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "hf_quant_config.json").write_text("{")
    path = tmp_path / "tracefit.yaml"
    path.write_text(json.dumps({"model_config": str(tmp_path)}))
    assert main(["config", "check", "--config", str(path)]) == 78
    printed = capsys.readouterr()
    assert "hf_quant_config.json" in printed.out + printed.err
