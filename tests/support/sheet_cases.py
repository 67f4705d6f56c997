"""Models whose numbers are worked out by hand in the tests: one dense, one GQA, one MoE, one MLA."""

import json

from online.features.sheets import architecture
from online.features.sheets.deployment import hardware_sheets
from tests.support.paths import ROOT

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "torch_dtype": "float16",
}
GQA = DENSE | {"num_key_value_heads": 2}
MOE = GQA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = DENSE | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}

ROUND = {"peak_tflops": 1.0, "memory_bandwidth_gb_s": 1.0, "sm_count": 10, "link_gb_s": 1.0, "host_link_gb_s": 1.0}
"""A machine whose limits are round: 1e6 flops and 1e3 bytes per microsecond."""

KNOBS = {
    "tensor_parallel_size": 1,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 10,
    "max_model_len": 1000,
    "block_size": 16,
    "enable_chunked_prefill": True,
}

SHEETS_FILE = ROOT / "online/features/sheets/hardware.json"


def facts_of(config, **knobs):
    """Facts of a configuration: architecture, the round machine, knobs."""
    return {**architecture(config), **ROUND, **KNOBS, **knobs}


def shipped_sheets():
    """The table in the wheel."""
    return hardware_sheets(json.loads(SHEETS_FILE.read_text()))
