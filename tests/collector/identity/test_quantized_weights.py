"""Quantized checkpoints have the bytes that they have, or no data sheet and a sentence that says why."""

import json
import re

import pytest

from collector.config import Config, Rule
from collector.identity import ConfigResolver, EngineFacts
from online.bank import Bank
from online.features.sheets import sheet_of
from tests.support.sheet_cases import GQA

MODEL = GQA | {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8, "torch_dtype": "bfloat16"}


FP8 = """{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups":
    {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "group_size": null}}}}"""
W4A16 = """{"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups":
    {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}}}"""
NVFP4 = FP8.replace('"num_bits": 8', '"num_bits": 4').replace("null", "16")
MIXED = FP8.replace("}}}}", """}}, "group_1": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}""")


def known(directory, said):
    """What is known of a server: what stands in its config.json, in the file beside it, or is told by the engine."""
    where, _, what = said.partition(" ")
    model, facts = dict(MODEL), {"gpu": "H100", "model_config": str(directory)}
    if where.endswith("_config"):
        model[where] = json.loads(what)
    elif where == "beside":
        quantization = {"quant_algo": json.loads(what), "kv_cache_quant_algo": "FP8"}
        beside = {"producer": {"name": "modelopt"}, "quantization": quantization}
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    else:
        facts["quantization"] = what
        model |= {"quantization_config": json.loads(W4A16)} if where == "both" else {}
    (directory / "config.json").write_text(json.dumps(model))
    told = EngineFacts()
    ConfigResolver(Config(rules=(Rule(facts=facts),))).apply(told, {}, "e", "")
    return told.as_dict()


SIZES = f"""
1.0     quantization_config {FP8}
0.5     quantization_config {W4A16}
0.5625  quantization_config {NVFP4}
0.5625  quantization_config {NVFP4.replace("compressed-tensors", 'modelopt", "quant_algo": "NVFP4')}
1.0     quantization_config {{"quant_method": "modelopt", "quant_algo": "FP8"}}
0.5     quantization_config {{"quant_method": "awq", "bits": 4, "group_size": 128}}
1.0     quantization_config {{"quant_method": "gptq", "bits": 8}}
0.5     quantization_config {{"quant_method": "bitsandbytes", "load_in_4bit": true}}
0.53125 quantization_config {{"quant_method": "mxfp4"}}
1.0     compression_config {FP8}
1.0     beside "FP8"
0.5625  beside "NVFP4"
0.5     beside "W4A16_AWQ"
2.0     beside null
1.0     engine fp8
1.0     engine modelopt
0.5625  engine modelopt_fp4
0.5     engine awq_marlin
0.5     engine gptq
2.0     engine none
0.5     both compressed-tensors
"""
UNKNOWN = f"""
quark                    quantization_config {{"quant_method": "quark"}}
compressed-tensors       quantization_config {MIXED}
modelopt MIXED_PRECISION quantization_config {{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}}
compressed-tensors       engine compressed-tensors
torchao                  engine torchao
"""
"""Bytes of a weight, or the method that is not known, and where what is said."""


def rows(table):
    """Its lines, without the indented ones' breaks, cut after the first column."""
    lines = table.replace("\n    ", " ").strip().splitlines()
    return [re.fullmatch(r"(.+?) +((?:\w+_config|beside|engine|both) .+)", line).groups() for line in lines]


@pytest.mark.parametrize(("size", "said"), rows(SIZES))
def test_a_weight_has_the_bytes_that_config_json_the_file_beside_it_or_the_engine_says(tmp_path, size, said):
    facts = known(tmp_path, said)
    assert (facts["weight_element_bytes"], facts["element_bytes"]) == (float(size), 2.0)
    assert sheet_of(facts)[1] == ()


@pytest.mark.parametrize(("named", "said"), rows(UNKNOWN))
def test_an_unknown_method_gives_no_bound_and_says_so(tmp_path, named, said):
    facts = known(tmp_path, said)
    assert sheet_of(facts)[1] == (f"bytes of a weight (quantization '{named}' is not known here)",)
    assert prior_prediction(facts) is None


def prior_prediction(facts):
    """The intercept before the first row, by the sheet alone; None without one."""
    bank = Bank(Config(learners=("rls",)))
    bank.describe("c", facts)
    target = bank.targets("c").get("step_time")
    return None if target is None else target.models["portable"].features[0].coefficient


def test_half_the_bytes_foretell_half_of_the_time_that_weights_take(tmp_path, monkeypatch):
    """What is left of the intercept are overheads of layers."""
    monkeypatch.setitem(MODEL, "intermediate_size", 65536)
    bf16, fp8, nvfp4 = (prior_prediction(known(tmp_path, f"quantization_config {q}")) for q in ("{}", FP8, NVFP4))
    weights = 2.0 * (bf16 - fp8)
    assert weights > 400.0
    assert bf16 - nvfp4 == pytest.approx(weights * (2.0 - 0.5625) / 2.0, rel=1e-6)
