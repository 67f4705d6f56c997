"""What a config.json says, worked out by hand; and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from online.features.sheets import architecture
from online.features.sheets.model import model_sheet
from tests.support.configurations import LLAMA7B, MIXTRAL
from tests.support.sheet_cases import DENSE, GQA, MLA, MOE


def _sheet(config):
    sheet, missing = model_sheet(architecture(config))
    assert missing == ()
    return sheet


def test_latent_attention_caches_its_latent_only():
    sheet = _sheet(MLA)
    attention = 64 * 24 + 24 * 4 * 12 + 64 * 20 + 16 * 4 * 16 + 4 * 8 * 64
    dense, moe = 3 * 64 * 128, 3 * 64 * 32
    assert sheet.kv_bytes_per_token == 2 * (16 + 4) * 2
    assert sheet.attention_flops_per_pair == 2 * 2 * 4 * (12 + 8)
    assert sheet.moe_layers == 1
    assert sheet.flops_per_token == 2 * (2 * attention + dense + 2 * moe + moe + 64 * 8)


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (LLAMA7B, 6.738, 6.738),
        (MIXTRAL, 46.70, 12.88),
        (
            {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
            | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1},
            30.53,
            3.35,
        ),
        (
            {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61}
            | {"num_attention_heads": 128, "vocab_size": 129280, "moe_intermediate_size": 2048, "kv_lora_rank": 512}
            | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
            | {"moe_layer_freq": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
            | {"v_head_dim": 128},
            671.0,
            37.55,
        ),
    ],
)
def test_published_parameter_counts_come_out(config, billions, active):
    """Stored are weights of two bytes with one head; computed with are those of a token. Embeddings come on top."""
    sheet, head = _sheet(config), config["vocab_size"] * config["hidden_size"]
    assert (sheet.weight_bytes / 2 + head) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (sheet.flops_per_token / 2 + 2 * head) / 1e9 == pytest.approx(active, rel=5e-3)


def test_experts_are_where_the_family_puts_them():
    qwen = MOE | {"model_type": "qwen2_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    assert architecture(qwen)["num_moe_layers"] == 2
    deepseek = MLA | {"num_hidden_layers": 6, "first_k_dense_replace": 2}
    assert architecture(deepseek)["num_moe_layers"] == 4


def test_older_and_unknown_names_mean_the_same_and_a_multimodal_file_counts_by_its_text_model():
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 256, "vocab_size": 100}
    assert _sheet(gpt2).flops_per_token == 2 * 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert _sheet(DENSE | {"model_type": "newmodel"}) == _sheet(DENSE)
    assert architecture({"model_type": "llava", "text_config": GQA})["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("key", "lie"),
    [
        *(("num_hidden_layers", {"num_hidden_layers": bad}) for bad in (-2, 0, True, 1.5, "2", math.nan, math.inf)),
        ("hidden_size", {"hidden_size": 10**30}),
        ("moe_layer_freq", {"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layer_freq": -1}),
        ("vocab_size", {"vocab_size": [1, 2]}),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_key(lie, key):
    with pytest.raises(ValueError, match=key):
        architecture(GQA | lie)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "num_hidden_layers"),
        ({k: v for k, v in DENSE.items() if k != "intermediate_size"}, "intermediate_size"),
        (DENSE | {"ssm_state_size": 16, "model_type": "jamba"}, "recurrent"),
        (DENSE | {"kv_lora_rank": 16}, "qk_nope_head_dim"),
    ],
)
def test_what_cannot_be_derived_is_said(config, missing):
    sheet, names = model_sheet(architecture(config))
    assert sheet is None
    assert any(missing in name for name in names)


_JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(st.dictionaries(st.sampled_from(sorted({*MLA, "mlp_only_layers"})), _JUNK))
def test_junk_is_refused_or_read_and_nothing_else_happens(junk):
    try:
        arch = architecture(MOE | junk)
    except ValueError:
        return
    sheet, missing = model_sheet(arch)
    assert (sheet is None) == bool(missing)
