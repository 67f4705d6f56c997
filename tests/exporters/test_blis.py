"""Export for BLIS: what it reads back is what we learned.

The formulas here are an own reading of BLIS's trained-physics backend as its documentation and our docs/blis.md state
them; nothing is shared with the exporter.
"""

import math

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exporters.blis import BlisError, bandwidth_of, blis_coefficients, export, render_flags, render_yaml
from online.snapshot import FeatureSnapshot, ModelSnapshot, ShapeFactorSnapshot, TargetSnapshot
from tests.support import exporter_cases as cases

LLAMA_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8}


def blis_step_us(beta, sheet, tensor_parallel_size, bandwidth_tb_s, batch):
    """BLIS's step time with 11 betas, dense model, one data-parallel rank, compute betas 0."""
    assert len(beta) == 11
    assert beta[0] == beta[1] == beta[2] == beta[3] == beta[4] == beta[7] == beta[10] == 0
    prefill_tokens, prefills, decodes, progress = batch
    head_dim = sheet["hidden_size"] // sheet["num_attention_heads"]
    key_value_dim = sheet["num_key_value_heads"] * head_dim
    bytes_per_token = sheet["num_hidden_layers"] * 2 * (key_value_dim / tensor_parallel_size) * 2
    bytes_per_us = bandwidth_tb_s * 1e6
    prefill_kv_us = bytes_per_token * prefill_tokens / bytes_per_us
    decode_kv_us = bytes_per_token * (progress + decodes) / bytes_per_us
    return beta[8] * prefill_kv_us + beta[9] * decode_kv_us + beta[5] * (prefills + decodes) + beta[6]


def our_step_us(coefficients, batch):
    prefill_tokens, prefills, decodes, progress = batch
    context = progress + decodes  # tokens computed before the step + tokens scheduled in it
    return (
        coefficients["intercept"]
        + coefficients["prefill_tokens"] * prefill_tokens
        + coefficients["decode_context_tokens"] * context
        + coefficients["requests"] * (prefills + decodes)
    )


def target_of(vector, values, means=None, statuses=None):
    """A target with these coefficients, by name; with means of their features, and a status that is not identified."""
    features = [
        FeatureSnapshot(name=name, unit="us", coefficient=value, status="identified", mean=(means or {}).get(name))
        for name, value in values.items()
    ]
    features = [msgspec.structs.replace(each, status=(statuses or {}).get(each.name, each.status)) for each in features]
    model = ModelSnapshot(features=features, rows=10, effective_rows=10.0)
    return TargetSnapshot(vector=vector, unit="us", champion="portable", models={"portable": model})


def line_target(intercept, slope, name, mean):
    return target_of("alpha", {"intercept": intercept, name: slope}, {name: mean})


def config_with(**targets):
    everything = {**cases.config().targets, **targets}
    return cases.config(targets={name: target for name, target in everything.items() if target is not None})


def exported(config, **kwargs):
    return blis_coefficients(config, **{"model_config": LLAMA_70B, **kwargs})


def file_of(config):
    return export(cases.snapshot(config), config, model_config=LLAMA_70B)[0].decode()


COLUMNS = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
positive = st.floats(1e-6, 1e6)
counts = st.integers(0, 100_000)


@given(
    values=st.fixed_dictionaries(dict.fromkeys(COLUMNS, positive | st.just(0.0))),
    batch=st.tuples(counts, counts, counts, counts),
)
def test_blis_predicts_our_step_time(values, batch):
    config = config_with(step_time=target_of("beta", values))
    text = render_yaml(cases.snapshot(), config, exported(config))
    beta = yaml.safe_load(text)["trained_physics_coefficients"]["beta_coeffs"]
    theirs = blis_step_us(beta, LLAMA_70B, 2, 3.35, batch)
    assert theirs == pytest.approx(our_step_us(values, batch), rel=1e-9)


@pytest.mark.parametrize("batch", [1.0, 12.0, 200.0])
def test_experts_of_a_mixture_are_told_by_a_line_through_the_batches_that_were_seen(batch):
    values = {"intercept": 4000.0, "prefill_tokens": 12.0, "decode_context_tokens": 0.02, "requests": 40.0}

    def ours(decodes):
        return our_step_us(values, (0, 0, decodes, 0)) + 9000.0 * (1.0 - (1.0 - 8 / 128) ** decodes)

    def found(shapes, **facts):
        target = target_of("beta", values | {"active_experts": 9000.0}, {"requests": batch})
        config = config_with(step_time=msgspec.structs.replace(target, shape_factors=shapes))
        facts = config.config | {"num_experts": 128, "num_experts_per_tok": 8} | facts
        return exported(msgspec.structs.replace(config, config=facts))

    usual = {n: (0.0, n, 0.0, ours(n)) for n in (batch, 4.0 * batch)}
    shapes = {f"decode:{n}": ShapeFactorSnapshot(factor=1.0, rows=64.0, usual=work) for n, work in usual.items()}
    for known, batches in ((shapes, usual), ({}, (batch,))):
        told = found(known)
        theirs = [blis_step_us(told.beta, LLAMA_70B, 2, 3.35, (0, 0, n, 0)) for n in batches]
        assert theirs == pytest.approx([ours(n) for n in batches], rel=1e-9)
        assert "no term for experts touched" in told.warnings[0]
    with pytest.raises(BlisError, match="num_experts_per_tok"):
        found({}, num_experts_per_tok="8")


def test_the_file_says_how_far_its_line_is_off_steps_without_prompts_and_with_them():
    usual = {"decode:8": (0.0, 8.0, 0.0, 18.0), "prefill:8-15:91-127": (100.0, 8.0, 200.0, 60.0)}
    shapes = {cell: ShapeFactorSnapshot(factor=1.0, rows=9.0, usual=work) for cell, work in usual.items()}
    target = target_of("beta", dict(zip(COLUMNS, (10.0, 0.1, 0.01, 1.0), strict=True)))
    said = "# step_time by these coefficients alone, mean error: steps without a prompt 0.0%, steps with one 50.0%"
    assert said in file_of(config_with(step_time=msgspec.structs.replace(target, shape_factors=shapes)))


def test_the_file_says_the_verdict_of_every_other_report_on_its_coefficients():
    few = target_of("beta", dict.fromkeys(COLUMNS, 1.0))
    assert "\n# not usable yet: learned from 10 rows, fewer than 256\n" in file_of(config_with(step_time=few))


@given(intercept=st.floats(0, 1e5), slope=st.floats(0, 100), tokens=st.floats(1, 5000))
def test_alphas_are_whole_not_negative_and_true_to_the_mean(intercept, slope, tokens):
    alpha = exported(config_with(post_decode=line_target(intercept, slope, "output_tokens", tokens))).alpha
    assert all(isinstance(value, int) and value >= 0 for value in alpha)
    assert alpha[1] + alpha[2] * tokens == pytest.approx(intercept + slope * tokens, abs=0.51, rel=1e-6)


def test_alpha_is_the_time_in_the_api_without_the_wait_that_blis_simulates():
    server_us = 9315.34 + 1.5 * 400
    with_wait = config_with(queue_wait=cases.target("queue_wait"))
    assert exported(with_wait).alpha[0] == round(server_us)
    assert exported(with_wait, alpha="effective").alpha[0] == round(server_us + 7400.0)


@pytest.mark.parametrize(("target", "places"), [("api_queueing", (0,)), ("post_decode", (1, 2))])
def test_an_absent_alpha_is_0_and_named_because_a_released_vllm_tells_none(target, places):
    whole, found = exported(config_with()), exported(config_with(**{target: None}))
    assert found.beta == whole.beta
    assert found.alpha == tuple(0 if place in places else whole.alpha[place] for place in range(3))
    assert f"# {target}: nothing learned yet, taken as 0" in file_of(config_with(**{target: None}))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("value", [None, -1.0, math.nan, math.inf])
def test_a_coefficient_that_is_absent_or_that_blis_would_die_of_is_refused_by_name(name, value):
    values = dict.fromkeys(COLUMNS, 1.0) | {name: value}
    known = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(BlisError, match=f"step_time: coefficient {name} is "):
        exported(config_with(step_time=target_of("beta", known)))


def test_the_file_is_one_that_the_strict_parser_takes():
    text = file_of(cases.config())
    document = yaml.safe_load(text)
    assert set(document) == {"version", "defaults", "workloads", "trained_physics_coefficients"}
    coefficients = document["trained_physics_coefficients"]
    assert {name: len(values) for name, values in coefficients.items()} == {"alpha_coeffs": 3, "beta_coeffs": 11}
    cases.assert_golden("golden.blis.yaml", text.encode())


def test_the_flags_carry_the_limits_that_are_known_and_no_others():
    facts = {
        "gpu": "NVIDIA L40S",
        "tensor_parallel_size": 2,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks": 27_000,
        "block_size": 16,
        "max_model_len": True,
    }
    flags = render_flags(exported(msgspec.structs.replace(cases.config(), config=facts))).decode()
    known = "--hardware L40S --tp 2 --max-num-seqs 128 --max-num-batched-tokens 2048 --total-kv-blocks 27000"
    assert flags.endswith(f" {known} --block-size-in-tokens 16\n")
    bare = render_flags(exported(msgspec.structs.replace(cases.config(), config={}), hardware="1.5")).decode()
    assert len(bare.split()) == 4


@pytest.mark.parametrize("nasty", ["a\nversion: 9", "x\u2028y", "tab\tquote'\"", "n" * 10_000])
def test_no_name_can_leave_its_comment(nasty):
    text = file_of(cases.config(name=nasty))
    assert next(line for line in text.splitlines() if line[:1] != "#") == "version: 0.0.1"
    assert len(yaml.safe_load(text)) == 4


def hidden_hits(status="weak", *, means=(200.0, 80.0), prompt_tokens=400.0):
    """Of request spans: 3 us a prompt token, 200 prompt tokens and 80 requests in the mean step."""
    values = {"intercept": 16_000.0, "prefill_tokens": 3.0, "decode_context_tokens": 0.05, "requests": 15.0}
    known = dict(zip(("prefill_tokens", "requests"), means, strict=True))
    config = config_with(
        step_time=target_of("beta", values, known, {"prefill_tokens": status}),
        api_queueing=line_target(9000.0, 0.0, "prompt_tokens", prompt_tokens),
    )
    return msgspec.structs.replace(config, telemetry="requests", prefix_hits_hidden=True)


@pytest.mark.parametrize("together", [1, 40, 80, 200])
def test_the_file_charges_each_folded_prompt_once(together):
    """Requests of 400 prompt and 158 output tokens that always run together; 80 of them make the mean step."""
    config, outputs = hidden_hits(), 158
    folded = exported(config)
    text = render_yaml(cases.snapshot(), config, folded).decode()
    told = yaml.safe_load(text)["trained_physics_coefficients"]
    sizes = (LLAMA_70B, 2, bandwidth_of("H100"))
    step_us = blis_step_us(told["beta_coeffs"], *sizes, (0, 0, together, 0))
    latency_us = told["alpha_coeffs"][0] + outputs * step_us
    bare_us = 9000 + outputs * (16_000 + (15.0 + 0.05) * together)
    prompts_us = 3.0 * 400 * together
    assert latency_us - bare_us == pytest.approx(prompts_us, rel=1e-9)
    said, _ = folded.warnings
    assert "for traces with prefix_group and without (blis-trace)" in said
    assert f"# {said}\n" in text
    assert exported(msgspec.structs.replace(config, prefix_hits_hidden=False)).warnings == folded.warnings[1:]


def test_a_data_sheets_price_is_of_a_computed_token_and_the_file_says_which_trace_it_is_for():
    config = hidden_hits("prior_only")
    found, plain = exported(config), exported(msgspec.structs.replace(config, prefix_hits_hidden=False))
    assert (found.alpha, found.beta) == (plain.alpha, plain.beta)
    assert "for traces with prefix_group;" in found.warnings[0]


def test_what_cannot_be_folded_says_which_trace_it_is_for():
    assert "without prefix_group (blis-trace) alone" in exported(hidden_hits(means=(None, None))).warnings[0]
    unknown = exported(hidden_hits(means=(8000.0, 1.0), prompt_tokens=None))
    alone = exported(hidden_hits(means=(5.0, 1.0)))
    assert unknown.beta[5:9] == pytest.approx((15.0 + 3.0 * 8000, 16_000.0, 0.0, 0.0))
    assert unknown.alpha[0] == 9000
    assert "the mean prompt is not known" in unknown.warnings[0]
    assert alone.beta[5:7] == (15.0, 16_000.0)
    assert alone.beta[8] > 0.0
    assert "hardly any others run" in alone.warnings[0]
