"""Simulated configurations that share one truth in physical units: what transfer must find again.

y = sum over the full physics columns of gamma_j x_j, times noise
"""

import numpy as np

from online.features import build
from online.features.sheets import architecture
from online.features.systems import PHYSICS
from online.rls import RlsLearner
from online.rows import STEP_FEATURES, Target
from online.transfer import donor_of
from online.transfer.donors import matrix
from tests.support.designs import learn
from tests.support.linear_steps import steps
from tests.support.sheet_cases import shipped_sheets

GAMMA = {
    "intercept": 1500.0,
    "has_prefill": 900.0,
    "t_tok": 1.2,
    "hinge": 0.8,
    "t_kv": 1.1,
    "t_pfattn": 2.0,
    "requests": 12.0,
    "t_weight": 1.3,
    "t_experts": 1.3,
}
LLAMA7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA70B = LLAMA7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MIXTRAL = LLAMA7B | {
    "model_type": "mixtral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_KNOBS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "max_model_len": 4096, "block_size": 16}
_SHEETS = shipped_sheets()


def _facts(config, gpu, tp):
    return {**architecture(config), **_SHEETS[gpu].facts("bfloat16"), "gpu": gpu, "tensor_parallel_size": tp, **_KNOBS}


CONFIGS = {
    "7b": _facts(LLAMA7B, "H100-SXM", 1),
    "7b-a100": _facts(LLAMA7B, "A100-80", 1),
    "70b": _facts(LLAMA70B, "H100-SXM", 4),
    "70b-tp8": _facts(LLAMA70B, "H200", 8),
    "mixtral": _facts(MIXTRAL, "H100-SXM", 2),
}


def rows_of(system, name, n=1500, seed=0, noise=0.01):
    """n steps of a configuration by the truth above."""
    facts = CONFIGS[name]
    rows = steps(n, seed).rows
    column = {name: rows.raw[:, j] for j, name in enumerate(STEP_FEATURES)}
    column["running"][:] = column["requests"]
    column["waiting"][:] = 0.0
    column["kv_usage_ratio"][:] = np.minimum(column["decode_context_tokens"] / 2e5, 1.0)
    column["kv_blocks_used"][:] = np.ceil(column["decode_context_tokens"] / 16)
    names = [column.name for column in system.table(Target.STEP_TIME, facts)]
    live, m = matrix(system, Target.STEP_TIME, facts, names)
    beta = m @ np.array([GAMMA.get(column, 0.0) for column in names])
    x = build(system.name, Target.STEP_TIME, facts).evaluate(rows)
    rng = np.random.default_rng(seed)
    y = x @ beta * np.exp(noise * rng.standard_normal(n))
    rows.elapsed_us[:] = y
    rows.end_ns[:] = np.cumsum(y * 1e3).astype(np.int64)
    return rows, dict(zip(live, beta, strict=True))


def learner_of(system, name, n=1500, seed=0, prior=None):
    """A learner of a system's columns, fed with n steps of a configuration."""
    features = build(system.name, Target.STEP_TIME, CONFIGS[name])
    return learn(RlsLearner(features, prior), rows_of(PHYSICS, name, n, seed)[0])


def donors_among(system, names):
    """What these configurations learned of a system's columns."""
    return [donor_of(name, CONFIGS[name], learner_of(system, name, seed=i)) for i, name in enumerate(names)]
