"""Which models are mixtures of experts, and how many experts they have, by what is told of them."""

import json

import pytest

from collector.config import Config, Rule
from collector.identity import ConfigResolver, EngineFacts, unknown_experts
from tests.support.sheet_cases import MLA, MOE


def facts_of(model, *, rules=(), **told):
    facts = EngineFacts()
    attributes = {"vllm.model": model, **{f"vllm.{name}": str(value) for name, value in told.items()}}
    ConfigResolver(Config(rules=tuple(rules))).apply(facts, attributes, "pod", "")
    return facts


EXPERTS = """
Qwen/Qwen3-30B-A3B 128 8
/models/Qwen3-30B-A3B-Instruct-2507-FP8 128 8
nvidia/DeepSeek-V3.2-NVFP4 256 8
MiniMaxAI/MiniMax-M2.5 256 8
mistralai/Mixtral-8x7B-Instruct-v0.1 8 2
openai/gpt-oss-20b 32 4
zai-org/GLM-4.5-Air-FP8 128 8
deepseek-ai/DeepSeek-R1-Distill-Llama-70B None None
deepseek-ai/DeepSeek-R1-0528-Qwen3-8B None None
meta-llama/Llama-3.1-8B-Instruct None None
Qwen/Qwen3-32B None None
"""


@pytest.mark.parametrize("line", EXPERTS.strip().splitlines())
def test_a_public_name_tells_the_experts(line):
    model, *experts = line.split()
    facts = facts_of(model)
    assert [str(facts.get(name)) for name in ("num_experts", "num_experts_per_tok")] == experts
    assert unknown_experts(facts.as_dict()) == ""
    assert facts.sources().get("num_experts") == ("model_name" if experts[0] != "None" else None)


@pytest.mark.parametrize("model", ["acme/57B-A14B", "acme/OLMoE", "acme/4x7B", "acme/Z-A13B", "x/MiniMax-M2-REAP"])
def test_a_name_may_tell_a_mixture_and_not_its_experts_and_a_file_without_them_makes_a_dense_model(model):
    facts = facts_of(model)
    assert facts.get("num_experts") is None
    assert "num_experts_per_tok" in unknown_experts(facts.as_dict())
    assert not unknown_experts({"model": model, "hidden_size": 512})


def test_what_the_server_says_of_itself_is_stronger_than_its_name():
    pruned = facts_of("acme/Qwen3-30B-A3B-pruned", num_experts=64)
    assert (pruned.get("num_experts"), pruned.get("num_experts_per_tok")) == (64, None)
    assert unknown_experts(pruned.as_dict())
    agrees = facts_of("Qwen/Qwen3-30B-A3B", num_experts=128)
    assert agrees.get("num_experts_per_tok") == 8
    assert agrees.sources()["num_experts"] == "resource"


@pytest.mark.parametrize(
    ("known", "is_unknown"),
    [
        ({"num_experts": 128}, True),
        ({"num_experts": 128, "num_experts_per_tok": 8}, False),
        ({"num_experts": 8, "num_experts_per_tok": 9}, True),
        ({"num_experts": 1}, False),
        ({"expert_parallel": True}, True),
        ({"expert_parallel": False}, False),
        (MLA, False),
        (MOE, False),
        (MOE | {"num_local_experts": 1, "num_experts_per_tok": 1}, False),
        (MOE | {"num_experts_per_tok": None}, True),
    ],
    ids=["half of it", "rule", "too many", "one", "spread", "not spread", "routed", "local", "one local", "no k"],
)
def test_a_mixture_whose_experts_are_told_in_part_is_unknown(tmp_path, known, is_unknown):
    if "model_type" in known:
        (tmp_path / "config.json").write_text(json.dumps(known))
        known = {"model_config": str(tmp_path / "config.json")}
    facts = facts_of("acme/m", rules=[Rule(facts=known)])
    assert bool(unknown_experts(facts.as_dict())) is is_unknown
