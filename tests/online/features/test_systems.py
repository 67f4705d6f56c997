"""Every formula of every system against numbers worked out by hand, on one dense, one GQA and one MoE model.

The machine does 1e6 flops and moves 1e3 bytes per microsecond; the knobs are Nb = 100, Ns = 10, Lmax = 1000, block 16.

    a layer of the dense model has 4 x 64 x 64 + 3 x 64 x 128 = 40 960 weights, of the GQA model 36 864, of the MoE
    model 12 288 + 256 (router) + 24 576 per expert; two layers, and a head of 6 400

    dense  token 0.16384 us (2 x 81 920 flops)   pair 0.000512 us   KV token 0.512 us   weights 176.64 us
    GQA    token 0.147456 us                     pair 0.000512 us   KV token 0.256 us   weights 160.256 us
    MoE    token 0.246784 us                     4 experts of 98.304 us, without them 62.976 us
"""

import numpy as np
import pytest

from online.features import SYSTEMS, build
from online.features.sheets import sheet_of
from online.features.systems import request_gates, step_gates
from online.rows import REQUEST_FEATURES, STEP_FEATURES, RowBlock, Target
from tests.support.sheet_cases import DENSE, GQA, KNOBS, MOE, facts_of

MODELS = {"dense": facts_of(DENSE), "gqa": facts_of(GQA), "moe": facts_of(MOE)}
TOKEN = {"dense": 0.16384, "gqa": 0.147456, "moe": 0.246784}
KV = {"dense": 0.512, "gqa": 0.256, "moe": 0.256}
WEIGHTS = {"dense": 176.64, "gqa": 160.256}
PAIR, EXPERT, MOE_REST = 0.000512, 98.304, 62.976

STEP = {
    "prefill_tokens": 30.0,
    "prefill_requests": 2.0,
    "decode_requests": 5.0,
    "decode_tokens": 5.0,
    "decode_context_tokens": 400.0,
    "prefill_attention": 700.0,
    "requests": 7.0,
    "running": 8.0,
    "waiting": 3.0,
    "kv_usage_ratio": 0.5,
    "kv_blocks_used": 50.0,
    "offload_blocks": 4.0,
    "restore_blocks": 2.0,
    "evicted_blocks": 3.0,
}
REQUEST = {
    "prompt_tokens": 200.0,
    "output_tokens": 50.0,
    "waiting": 3.0,
    "running": 10.0,
    "kv_usage_ratio": 0.5,
    "queued_tokens": 90.0,
}


def _block(values, names):
    return RowBlock.of_lines(np.array([[values.get(name, 0.0) for name in names]]), np.ones(1))


def values(name, target, facts, **changes):
    """The columns of one step or request by name, constants of the source included."""
    live = build(name, target, facts)
    vocabulary = STEP_FEATURES if target is Target.STEP_TIME else REQUEST_FEATURES
    row = (STEP if target is Target.STEP_TIME else REQUEST) | changes
    x = live.evaluate(_block(row, vocabulary))[0]
    constants = {c.name: c.constant for c in SYSTEMS[name].table(target, facts) if c.constant is not None}
    return dict(zip(live.names, x, strict=True)) | constants


def step(name, facts, **changes):
    return values(name, Target.STEP_TIME, facts, **changes)


def request(name, facts, **changes):
    return values(name, Target.QUEUE_WAIT, facts, **changes)


def of_regime(columns):
    """Those that the gates leave."""
    return {name: value for name, value in columns.items() if value}


def approx(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("model", ["dense", "gqa"])
def test_physics_of_a_step(model):
    token, kv = TOKEN[model], KV[model]
    assert step("physics", MODELS[model]) == approx(
        {
            "intercept": 1.0,
            "has_prefill": 1.0,
            "t_tok": 35 * token,
            "hinge": 0.0,
            "t_kv": (400 + 30) * kv,
            "t_pfattn": 700 * PAIR,
            "requests": 7.0,
            "t_weight": WEIGHTS[model],
        }
    )


def test_the_hinge_opens_where_computing_takes_longer_than_reading():
    found = step("physics", MODELS["dense"], prefill_tokens=995.0)
    assert found["hinge"] == approx(1000 * TOKEN["dense"] / 0.62 - WEIGHTS["dense"])


def test_physics_of_a_mixture_counts_the_experts_that_are_touched():
    found = step("physics", MODELS["moe"])
    assert found["t_experts"] == approx(4 * (1 - 0.5**35) * EXPERT)
    one = step("physics", MODELS["moe"], prefill_tokens=0.0, decode_tokens=1.0)
    assert one["t_experts"] == approx(2 * EXPERT)
    assert one["has_prefill"] == 0.0
    assert [each["tokens_to_32"] for each in (found, one)] == [32.0, 1.0]  # 35 tokens, and one
    assert "tokens_to_32" not in step("physics", MODELS["dense"])


def test_attention_of_unseen_chunks_is_that_of_fresh_equal_prompts():
    found = step("physics", MODELS["dense"], prefill_attention=np.nan)
    assert found["t_pfattn"] == approx(2 * 15**2 / 2 * PAIR)


def test_two_gpus_halve_tokens_weights_and_cache_and_add_all_reduces():
    sheet, _ = sheet_of(MODELS["gqa"] | {"tensor_parallel_size": 2})
    assert sheet.token_us == approx(TOKEN["gqa"] / 2)
    assert sheet.kv_token_us == approx(KV["gqa"] / 2)
    assert sheet.dense_weight_us == approx(WEIGHTS["gqa"] / 2)
    assert sheet.all_reduce_us == approx(2 * 2 * 64 * 2 * 2 * 0.5 / 1e3)
    wide, _ = sheet_of(MODELS["gqa"] | {"tensor_parallel_size": 4})
    assert wide.kv_token_us == approx(KV["gqa"] / 2), "two kv heads cannot be cut in four"


def test_physics_of_a_request():
    assert values("physics", Target.API_QUEUEING, MODELS["gqa"]) == {
        "intercept": 1.0,
        "prompt_tokens": 200.0,
        "running": 10.0,
    }
    assert request("physics", MODELS["gqa"]) == approx(
        {"intercept": 1.0, "waiting": 3.0, "t_prompt": 200 * TOKEN["gqa"], "saturated": 4.0}
    )
    assert request("physics", MODELS["gqa"], running=9.0)["saturated"] == 0.0


@pytest.mark.parametrize("model", MODELS)
def test_blackbox(model):
    assert step("blackbox", MODELS[model]) == {"intercept": 1.0, "prefill_tokens": 30.0, "decode_tokens": 5.0}
    assert request("blackbox", MODELS[model]) == {"intercept": 1.0, "prompt_tokens": 200.0, "output_tokens": 50.0}


@pytest.mark.parametrize("model", ["dense", "gqa"])
def test_roofline_of_a_small_step_is_reading(model):
    assert step("roofline", MODELS[model]) == approx(
        {"intercept": 1.0, "compute": 0.0, "memory": WEIGHTS[model] + (30 + 400) * KV[model]}
    )


def test_roofline_of_a_large_prefill_is_computing_and_its_decodes_still_read():
    faster_memory = MODELS["gqa"] | {"memory_bandwidth_gb_s": 10.0}
    found = step("roofline", faster_memory, prefill_tokens=5000.0)
    assert found["compute"] == approx(5000 * TOKEN["gqa"] + 700 * PAIR)
    assert found["memory"] == approx(5 / 5005 * WEIGHTS["gqa"] / 10 + 400 * KV["gqa"] / 10)


def test_roofline_of_a_mixture_reads_the_experts_it_touches():
    found = step("roofline", MODELS["moe"], prefill_tokens=0.0, prefill_attention=0.0)
    assert found["memory"] == approx(MOE_REST + 4 * (1 - 0.5**5) * EXPERT + 400 * KV["moe"])


@pytest.mark.parametrize("model", MODELS)
def test_picf(model):
    token, kv = TOKEN[model], KV[model]
    expected = {
        "intercept": 1.0,
        "t_prefill": 30 * token,
        "t_prefill_squared": 900 * PAIR,
        "t_decode_kv": 5 * kv * 16,
        "decode_running": 40.0,
        "mix": 150 / 35**2,
        "tokens_per_sm": 3.5,
        "usage_decode": 2.5,
    }
    if model == "moe":
        expected["t_decode_experts"] = 2 * 5 * EXPERT
    assert step("picf", MODELS[model]) == approx(expected)
    assert request("picf", MODELS[model]) == approx(
        {
            "intercept": 1.0,
            "waiting": 3.0,
            "waiting_squared": 9 * kv * 10,
            "pressure": 1 / 0.51,
            "pressure_waiting": 3 / 0.51,
            "chunks": 2.0,
            "chunks_running": 20.0,
            "chunked": 1.0,
            "seat_share": 0.1,
        }
    )


@pytest.mark.parametrize("model", MODELS)
def test_mole_rd_asks_one_expert_far_from_the_boundaries(model):
    token, kv = TOKEN[model], KV[model]
    found = step("mole_rd", MODELS[model], prefill_tokens=95.0)
    expected = {
        "prefill.intercept": 1.0,
        "prefill.t_tok": 95 * token,
        "prefill.t_squared": 95**2 * PAIR,
        "prefill.requests": 2.0,
    }
    if model == "moe":
        expected["prefill.experts"] = 2 * 95 * token
    assert of_regime(found) == approx(expected)
    found = step("mole_rd", MODELS[model], prefill_tokens=0.0)
    expected = {"decode.intercept": 1.0, "decode.t_kv": 400 * kv, "decode.tokens_running": 40.0}
    if model == "moe":
        expected["decode.experts"] = 4 * 5 * EXPERT
    assert of_regime(found) == approx(expected)
    found = step("mole_rd", MODELS[model], kv_usage_ratio=0.97, kv_blocks_used=50.0)
    assert of_regime(found) == approx(
        {
            "saturation.intercept": 1.0,
            "saturation.tokens": 35 * kv,
            "saturation.fragmentation": (1 - 430 / 800) * 35,
            "saturation.pressure": 1 / 0.04,
        }
    )
    found = step("mole_rd", MODELS[model], prefill_tokens=5.0)
    assert of_regime(found) == approx(
        {
            "mixed.intercept": 1.0,
            "mixed.prefill": 5 * token,
            "mixed.decode": 5 * kv,
            "mixed.mix": 0.25,
            "mixed.running_usage": 4.0,
        }
    )


@pytest.mark.parametrize(("data_parallel", "degree"), [({}, 2.0), ({"data_parallel_size": 4}, 8.0)])
def test_rece_has_expert_parallelism_as_a_degree(data_parallel, degree):
    spread = facts_of(MOE, tensor_parallel_size=2, expert_parallel=True, **data_parallel)
    assert step("rece", spread)["expert_parallel"] == degree
    sliced = facts_of(MOE, tensor_parallel_size=2, expert_parallel=False, **data_parallel)
    assert step("rece", sliced)["expert_parallel"] == 0.0


def test_mole_rd_with_offload_reads_the_transfers():
    facts = MODELS["gqa"] | {"cpu_offload": True}
    block = 16 * 256 / 1e3
    assert step("mole_rd", facts, prefill_tokens=0.0)["decode.offload"] == approx(6 * block)
    found = step("mole_rd", facts, kv_usage_ratio=0.97)
    assert found["saturation.evictions"] == approx(3 * block)


def test_gates_sum_to_one_and_are_soft_only_near_a_boundary():
    """A further intercept would be their sum, and no intercept of a regime could ever be known."""
    for target in (Target.STEP_TIME, Target.QUEUE_WAIT):
        assert "intercept" not in build("mole_rd", target, MODELS["gqa"]).names
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


def test_mole_rd_of_a_request_by_regime():
    facts = MODELS["dense"]
    low = request("mole_rd", facts, waiting=2.0)
    assert of_regime(low) == approx({"low.intercept": 1.0, "low.prompt": 0.2})
    high = request("mole_rd", facts, kv_usage_ratio=0.96)
    assert of_regime(high) == approx(
        {"high.intercept": 1, "high.pressure": 20, "high.waiting_usage": 2.88, "high.prompt_usage": 192}
    )
    normal = request("mole_rd", facts)
    assert of_regime(normal) == approx(
        {"normal.intercept": 1, "normal.waiting": 3, "normal.chunks": 2, "normal.seats": 1}
    )


@pytest.mark.parametrize("model", MODELS)
def test_hfd_tl(model):
    assert step("hfd_tl", MODELS[model]) == approx(
        {
            "intercept": 1.0,
            "t_prefill": 30 * TOKEN[model],
            "t_decode_kv": 5 * KV[model],
            "budget_share": 0.35,
            "usage_squared": 0.25,
            "inverse_tp": 1.0,
            "experts": 0.5 if model == "moe" else 0.0,
            "offload": 0.0,
        }
    )
    assert request("hfd_tl", MODELS[model]) == approx(
        {"intercept": 1, "queue": 0.3, "usage": 0.5, "prompt": 0.2, "queue_squared": 0.09}
        | {"inverse_tp": 1, "prefix": 0, "chunked": 1}
    )


@pytest.mark.parametrize("model", MODELS)
def test_rece(model):
    facts = MODELS[model] | {"tensor_parallel_size": 2, "cpu_offload": True}
    expected = {
        "intercept": 1.0,
        "t_prefill": 30 * TOKEN[model] / 2,
        "t_decode_kv": 5 * KV[model] / 2,
        "budget_share": 0.35,
        "prefill_squared": 0.09,
        "decode_squared": 0.0025,
        "prefill_decode": 0.015,
        "prefill_usage": 0.15,
        "decode_running": 0.4,
        "usage": 0.5,
        "usage_squared": 0.25,
        "inverse_tp": 0.5,
        "experts_per_token": 0.25 if model == "moe" else 0.0,
        "offload": 1.0,
        "expert_parallel": 0.0,
        "t_link": 35 * 64 * 2 * 2 / 1e3,
        "link_running": 8.0,
        "t_offload": 4 * 16 * KV[model] / 2,
        "t_restore": 2 * 16 * KV[model] / 2,
    }
    if model == "moe":
        expected["t_experts"] = 35 * 0.5 * (2 * 2 * 2 * 24576 / 2 / 1e6)
    assert step("rece", facts) == approx(expected)
    assert request("rece", facts) == approx(
        {"intercept": 1, "queue": 0.3, "queue_squared": 0.09, "usage": 0.5, "usage_squared": 0.25, "prompt": 0.2}
        | {"prompt_squared": 0.04, "queue_usage": 0.15, "prompt_usage": 0.1, "seats": 1.0, "seats_usage": 0.5}
        | {"inverse_tp": 0.5, "prefix": 0, "chunked": 1, "several_gpus": 1, "t_link": 200 * 64 * 2 * 2 / 1e3}
    )


@pytest.mark.parametrize("model", MODELS)
def test_bsr_ard_holds_rece_and_what_only_physics_and_picf_have(model):
    found = step("bsr_ard", MODELS[model])
    physics, rece = (step(name, MODELS[model]) for name in ("physics", "rece"))
    picf = step("picf", MODELS[model])
    assert rece.items() <= found.items()
    for name in ("has_prefill", "hinge", "t_kv", "t_pfattn", "requests"):
        assert found[name] == physics[name]
    assert (found["mix"], found["usage_decode"]) == (picf["mix"], picf["usage_decode"])


@pytest.mark.parametrize(("name", "target"), [(name, target) for name in SYSTEMS for target in SYSTEMS[name].tables])
def test_every_column_of_a_live_set_varies_and_has_a_unit_and_a_definition(name, target):
    live, names = build(name, target, MODELS["moe"]), target.vocabulary
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


def test_what_is_multiplied_by_nothing_need_not_be_known():
    found = step("picf", MODELS["dense"], decode_tokens=0.0, running=np.nan)
    assert found["decode_running"] == 0.0
    assert np.isnan(step("picf", MODELS["dense"], running=np.nan)["decode_running"])


@pytest.mark.parametrize("name", ["physics", "roofline", "picf", "mole_rd", "hfd_tl", "bsr_ard", "rece"])
def test_without_sheets_a_system_is_not_offered(name):
    assert build(name, Target.STEP_TIME, {}) is None
    assert build(name, Target.STEP_TIME, dict(KNOBS)) is None


def test_an_empty_step_gives_finite_columns():
    for name in ("portable", *SYSTEMS):
        live = build(name, Target.STEP_TIME, MODELS["moe"] | {"cpu_offload": True})
        assert np.isfinite(live.evaluate(_block({}, STEP_FEATURES))).all(), name
