"""Every formula of every system against numbers worked out by hand, on one dense, one GQA and one MoE model.

The machine does 1e6 flops and moves 1e3 bytes per microsecond; the knobs are Nb = 100, Ns = 10, Lmax = 1000, block 16.

    a layer of the dense model has 4 x 64 x 64 + 3 x 64 x 128 = 40 960 weights, of the GQA model 36 864, of the MoE
    model 12 288 + 256 (router) + 24 576 per expert; two layers, and a head of 6 400

    dense  token 0.16384 us (2 x 81 920 flops)   pair 0.000512 us   KV token 0.512 us   weights 176.64 us
    GQA    token 0.147456 us                     pair 0.000512 us   KV token 0.256 us   weights 160.256 us
    MoE    token 0.246784 us                     4 experts of 98.304 us, without them 62.976 us
"""

from typing import NamedTuple

import numpy as np
import pytest

from online.features import SYSTEMS, build, missing
from online.features.sheets import sheet_of
from online.features.systems import request_gates, step_gates
from online.rows import REQUEST_FEATURES, STEP_FEATURES, RowBlock, Target
from tests.support.sheet_cases import DENSE, GQA, KNOBS, MOE, facts_of

STEP, WAIT = Target.STEP_TIME, Target.QUEUE_WAIT
PAIR, EXPERT, MOE_REST = 0.000512, 98.304, 62.976
TYPICAL = {
    "prefill_tokens": 30.0,
    "prefill_requests": 2.0,
    "decode_requests": 5.0,
    "decode_tokens": 5.0,
    "decode_context_tokens": 400.0,
    "prefill_attention": 700.0,
    "requests": 7.0,
    "kv_blocks_used": 50.0,
    "offload_blocks": 4.0,
    "restore_blocks": 2.0,
    "evicted_blocks": 3.0,
    "prompt_tokens": 200.0,
    "output_tokens": 50.0,
    "waiting": 3.0,
    "kv_usage_ratio": 0.5,
}
RUNNING = {STEP: 8.0, WAIT: 10.0, Target.API_QUEUEING: 10.0}


class Model(NamedTuple):
    """One of those above; ``mixed`` are numbers that are 0 of a dense one."""

    facts: dict
    token: float
    kv: float
    weights: float
    mixed: float = 0.0


MODELS = {
    "dense": Model(facts_of(DENSE), 0.16384, 0.512, 176.64),
    "gqa": Model(facts_of(GQA), 0.147456, 0.256, 160.256),
    "moe": Model(facts_of(MOE), 0.246784, 0.256, MOE_REST, 1.0),
}


def values(name, target, facts, **changes):
    """The columns of one step or request by name, constants of the source included."""
    live, row = build(name, target, facts), TYPICAL | {"running": RUNNING[target]} | changes
    x = live.evaluate(RowBlock.of_lines(np.array([[row.get(each, 0.0) for each in target.vocabulary]]), np.ones(1)))[0]
    constants = {c.name: c.constant for c in SYSTEMS[name].table(target, facts) if c.constant is not None}
    return dict(zip(live.names, x, strict=True)) | constants


def approx(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def of_regime(regime, **columns):
    return {f"{regime}.{name}": value for name, value in ({"intercept": 1.0} | columns).items()}


def physics(m):
    experts = m.mixed * 4 * (1 - 0.5**35) * EXPERT
    return {"intercept": 1, "has_prefill": 1, "t_tok": 35 * m.token, "t_kv": 430 * m.kv, "t_pfattn": 700 * PAIR} | {
        "requests": 7,
        "t_weight": m.weights,
        "t_experts": experts,
        "tokens_to_32": 32 * m.mixed,
    }


def picf(m):
    return {
        "intercept": 1,
        "t_prefill": 30 * m.token,
        "t_prefill_squared": 900 * PAIR,
        "t_decode_kv": 5 * m.kv * 16,
        "decode_running": 40,
        "mix": 150 / 35**2,
        "t_decode_experts": m.mixed * 2 * 5 * EXPERT,
        "tokens_per_sm": 3.5,
        "usage_decode": 2.5,
    }


def rece(m):
    return {
        "intercept": 1,
        "t_prefill": 30 * m.token,
        "t_decode_kv": 5 * m.kv,
        "budget_share": 0.35,
        "prefill_squared": 0.09,
        "decode_squared": 0.0025,
        "prefill_decode": 0.015,
        "prefill_usage": 0.15,
        "decode_running": 0.4,
        "usage": 0.5,
        "usage_squared": 0.25,
        "inverse_tp": 1,
        "experts_per_token": 0.25 * m.mixed,
        "t_experts": m.mixed * 35 * 0.5 * (2 * 2 * 2 * 24576 / 1e6),
    }


CASES = [
    ("physics", STEP, {}, physics),
    ("physics", Target.API_QUEUEING, {}, lambda _: {"intercept": 1, "prompt_tokens": 200, "running": 10}),
    ("physics", WAIT, {}, lambda m: {"intercept": 1, "waiting": 3, "t_prompt": 200 * m.token, "saturated": 4}),
    ("physics", WAIT, {"running": 9.0}, lambda m: {"intercept": 1, "waiting": 3, "t_prompt": 200 * m.token}),
    (
        *("roofline", STEP, {"prefill_tokens": 0.0, "prefill_attention": 0.0}),
        lambda m: {"intercept": 1, "memory": m.weights + m.mixed * 4 * (1 - 0.5**5) * EXPERT + 400 * m.kv},
    ),
    ("roofline", WAIT, {}, lambda _: {"intercept": 1, "prompt_tokens": 200}),
    ("picf", STEP, {}, picf),
    (
        *("picf", WAIT, {}),
        lambda m: (
            {"intercept": 1, "waiting": 3, "waiting_squared": 9 * m.kv * 10, "pressure": 1 / 0.51}
            | {"pressure_waiting": 3 / 0.51, "chunks": 2, "chunks_running": 20, "chunked": 1, "seat_share": 0.1}
        ),
    ),
    (
        *("mole_rd", STEP, {"prefill_tokens": 95.0}),
        lambda m: (
            of_regime("prefill", t_tok=95 * m.token, t_squared=95**2 * PAIR, requests=2)
            | {"prefill.experts": 2 * 95 * m.token * m.mixed}
        ),
    ),
    (
        *("mole_rd", STEP, {"prefill_tokens": 0.0}),
        lambda m: of_regime("decode", t_kv=400 * m.kv, tokens_running=40, experts=4 * 5 * EXPERT * m.mixed),
    ),
    (
        *("mole_rd", STEP, {"kv_usage_ratio": 0.97}),
        lambda m: of_regime("saturation", tokens=35 * m.kv, fragmentation=(1 - 43 / 80) * 35, pressure=25),
    ),
    (
        *("mole_rd", STEP, {"prefill_tokens": 5.0}),
        lambda m: of_regime("mixed", prefill=5 * m.token, decode=5 * m.kv, mix=0.25, running_usage=4),
    ),
    ("mole_rd", WAIT, {"waiting": 2.0}, lambda _: of_regime("low", prompt=0.2)),
    (
        *("mole_rd", WAIT, {"kv_usage_ratio": 0.96}),
        lambda _: of_regime("high", pressure=20, waiting_usage=2.88, prompt_usage=192),
    ),
    ("mole_rd", WAIT, {}, lambda _: of_regime("normal", waiting=3, chunks=2, seats=1)),
    (
        *("hfd_tl", STEP, {}),
        lambda m: (
            {"intercept": 1, "t_prefill": 30 * m.token, "t_decode_kv": 5 * m.kv, "budget_share": 0.35}
            | {"usage_squared": 0.25, "inverse_tp": 1, "experts": 0.5 * m.mixed}
        ),
    ),
    (
        *("hfd_tl", WAIT, {}),
        lambda _: (
            {"intercept": 1, "queue": 0.3, "usage": 0.5, "prompt": 0.2, "queue_squared": 0.09}
            | {"inverse_tp": 1, "chunked": 1}
        ),
    ),
    ("rece", STEP, {}, rece),
    (
        *("rece", WAIT, {}),
        lambda _: (
            {"intercept": 1, "queue": 0.3, "queue_squared": 0.09, "usage": 0.5, "usage_squared": 0.25}
            | {"prompt": 0.2, "prompt_squared": 0.04, "queue_usage": 0.15, "prompt_usage": 0.1, "seats": 1}
            | {"seats_usage": 0.5, "inverse_tp": 1, "chunked": 1}
        ),
    ),
    (
        *("bsr_ard", STEP, {}),
        lambda m: (
            rece(m)
            | {name: physics(m)[name] for name in ("has_prefill", "t_kv", "t_pfattn", "requests", "tokens_to_32")}
            | {"t_experts_read": physics(m)["t_experts"], "mix": 150 / 35**2, "usage_decode": 2.5}
        ),
    ),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "target", "changes", "expected"), CASES)
def test_the_columns_of_a_system_that_are_not_0_are_those_worked_out_by_hand(name, target, changes, expected, model):
    found = values(name, target, MODELS[model].facts, **changes)
    known = expected(MODELS[model])
    assert {each: value for each, value in found.items() if value} == approx({k: v for k, v in known.items() if v})


def test_the_hinge_opens_where_computing_takes_longer_than_reading():
    m = MODELS["dense"]
    found = values("physics", STEP, m.facts, prefill_tokens=995.0)
    assert found["hinge"] == approx(1000 * m.token / 0.62 - m.weights)


def test_roofline_of_a_large_prefill_is_computing_and_its_decodes_still_read():
    m = MODELS["gqa"]
    found = values("roofline", STEP, m.facts | {"memory_bandwidth_gb_s": 10.0}, prefill_tokens=5000.0)
    assert found["compute"] == approx(5000 * m.token + 700 * PAIR)
    assert found["memory"] == approx(5 / 5005 * m.weights / 10 + 400 * m.kv / 10)


def test_several_gpus_share_tokens_weights_and_cache_and_add_all_reduces():
    m = MODELS["gqa"]
    for gpus, kv_shards in ((2, 2), (4, 2)):  # two KV heads cannot be cut in four
        sheet, _ = sheet_of(m.facts | {"tensor_parallel_size": gpus})
        assert (sheet.token_us, sheet.dense_weight_us) == approx((m.token / gpus, m.weights / gpus))
        assert sheet.kv_token_us == approx(m.kv / kv_shards)
        assert sheet.all_reduce_us == approx(2 * 2 * 64 * 2 * 2 * (gpus - 1) / gpus / 1e3)


def test_gates_sum_to_one_and_are_soft_only_near_a_boundary():
    """A further intercept would be their sum, and no intercept of a regime could ever be known."""
    for target in (STEP, WAIT):
        assert "intercept" not in build("mole_rd", target, MODELS["gqa"].facts).names
    rng = np.random.default_rng(0)
    raw = {name: rng.uniform(0, 20, 1000) for name in (*STEP_FEATURES, *REQUEST_FEATURES)}
    raw["kv_usage_ratio"] = rng.uniform(0, 1, 1000)
    for gates in (step_gates(raw), request_gates(raw)):
        weights = np.stack(list(gates.values()))
        assert weights.min() >= -1e-12
        assert np.allclose(weights.sum(axis=0), 1.0)
        assert 0.3 < (weights.max(axis=0) == 1.0).mean() < 1.0
    boundary = {"prefill_tokens": np.array([7.0]), "decode_tokens": np.array([3.0]), "kv_usage_ratio": np.array([0.1])}
    found = step_gates(boundary)
    assert (found["prefill"][0], found["mixed"][0]) == (approx(0.5), approx(0.5))


@pytest.mark.parametrize(("name", "target"), [(name, target) for name in SYSTEMS for target in SYSTEMS[name].tables])
def test_every_column_of_a_live_set_varies_and_has_a_unit_and_a_definition(name, target):
    live, names = build(name, target, MODELS["moe"].facts), target.vocabulary
    rng = np.random.default_rng(1)
    raw = np.exp(rng.uniform(0, 5, (300, len(names))))
    raw[:, names.index("kv_usage_ratio")] = rng.uniform(0, 1, 300)
    raw[::3, 0] = 0.0
    raw[::7, 0] *= 100.0
    x = live.evaluate(RowBlock.of_lines(raw, np.ones(300)))
    for j, column in enumerate(live.columns):
        assert column.constant is None
        assert column.name == "intercept" or np.ptp(x[:, j]) > 0, column.name
        assert column.unit.startswith("us")
        assert column.definition


@pytest.mark.parametrize("name", ["physics", "roofline", "picf", "mole_rd", "hfd_tl", "bsr_ard", "rece"])
def test_without_sheets_a_system_is_not_offered(name):
    assert build(name, STEP, {}) is None
    assert build(name, STEP, dict(KNOBS)) is None
    facts = MODELS["dense"].facts | dict.fromkeys(("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
    assert (build(name, STEP, facts) is None) <= bool(missing([name], facts))
    assert missing([name], MODELS["dense"].facts) == []


def test_an_empty_step_gives_finite_columns():
    for name in ("portable", *SYSTEMS):
        live = build(name, STEP, MODELS["moe"].facts | {"cpu_offload": True})
        assert np.isfinite(live.evaluate(RowBlock.of_lines(np.zeros((1, len(STEP_FEATURES))), np.ones(1)))).all(), name
