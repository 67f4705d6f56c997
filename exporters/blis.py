"""BLIS: one configuration's coefficients, and recorded traffic, as the simulator loads them, unchanged.

BLIS (trained-physics backend) predicts, in microseconds,

    step  = b[8] T_pf_kv + b[9] T_dc_kv + b[5] B + b[6] + terms whose coefficients we set to 0
    T_pf_kv = kv P          T_dc_kv = kv (context + D)          B = prefill + decode requests
    kv    = layers * 2 * (kv_heads * head_dim / TP) * 2 bytes / (BwPeakTBs * 1e6)        us per token

and our ``portable`` step time is c0 + c_p P + c_c (context + D) + c_b B, the same four columns, so that

    b[6] = c0    b[8] = c_p / kv    b[9] = c_c / kv    b[5] = c_b

is exact as long as kv here is kv there: shapes of models and bandwidths of GPUs are BLIS's own figures. With fewer than
10 betas BLIS takes a maximum of compute and memory time instead of the sum. docs/blis.md states for its users how
alphas, experts and hidden prefix-cache hits are folded into what BLIS can hold. Of the last, with P and R the mean
prompt tokens and requests of a step and N the mean prompt:

    f = c_p P / (R - 1)      b[5] += f      b[6] -= f      alpha[0] += c_p N      and without N      b[5] += c_p P / R

Traffic is written as BLIS's TraceV2: a header, and a table whose 27 columns are read by their position, with times in
whole microseconds since the first arrival.

Guarantee: a step time or a mean post-decode time predicted from the exported file equals ours within 0.15 %
(tests/exporters/test_blis.py), as far as whole microseconds allow.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from exporters.what_if import Advisory
from exporters.wording import REASONS, estimate, printable
from online import ConfigSnapshot, FeatureSnapshot, Snapshot
from online.features import ACTIVE_EXPERTS, experts_in, share_touched

BYTES_PER_KV_ELEMENT = 2.0

BANDWIDTH_TB_S: dict[str, float] = {"H100": 3.35, "A100-SXM": 2.039, "A100-80": 2.039, "L40S": 0.864}
"""BwPeakTBs in BLIS's hardware_config.json, by its GPU names."""


def kv_elements_per_token(model_config: Mapping[str, Any]) -> float | None:
    """Keys and values of a token by a config.json, or facts with the same names, as BLIS reads it.

    A ``text_config`` inside wins. None if a needed number is missing or not positive.
    """
    inner = model_config.get("text_config")
    values = {**model_config, **inner} if isinstance(inner, Mapping) else model_config

    def number(*names: str) -> int:
        given = (values.get(name) for name in names)
        return next((int(v) for v in given if _is_number(v) and v >= 1), 0)

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    kv_heads = number("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    return layers * 2 * kv_heads * (hidden // heads) if heads and layers and hidden // heads else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bandwidth_of(hardware: str) -> float | None:
    """Memory bandwidth in TB/s that BLIS uses for a GPU, by a name that contains BLIS's, or the number itself."""
    try:
        number = float(hardware)
    except ValueError:
        name = blis_name_of(hardware)
        return None if name is None else BANDWIDTH_TB_S[name]
    return number if math.isfinite(number) and number > 0 else None


def blis_name_of(hardware: str) -> str | None:
    """BLIS's name of a GPU by this or a longer name."""
    squeezed = re.sub(r"[^A-Z0-9]", "", hardware.upper())
    return next((name for name in BANDWIDTH_TB_S if name.replace("-", "") in squeezed), None)


N_BETAS = 11
MAX_ALPHA_US = 1e12

LIMIT_FLAGS = {
    "tp": "tensor_parallel_size",
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "total-kv-blocks": "num_gpu_blocks",
    "block-size-in-tokens": "block_size",
    "max-model-len": "max_model_len",
}
"""Flags of ``blis run`` and ``blis replay`` by the fact that they take."""
_STEP_COLUMNS = {"prefill_tokens": 8, "decode_context_tokens": 9, "requests": 5, "intercept": 6}
MAX_COMMENT_CHARS = 400
"""Of a line of a comment in a file."""


class Coefficients(NamedTuple):
    """What BLIS loads, limits of the engine by its flags, and what a reader has to know, and may."""

    alpha: tuple[int, int, int]
    beta: tuple[float, ...]
    kv_us_per_token: float
    limits: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


class BlisError(ValueError):
    """The configuration cannot be exported; the text says what is missing and which option supplies it."""


def blis_coefficients(
    config: ConfigSnapshot,
    *,
    model_config: Mapping[str, Any] | None = None,
    hardware: str | None = None,
    alpha: str = "server",
) -> Coefficients:
    """Translate one configuration's coefficients.

    Args:
        config: the configuration with its targets.
        model_config: the model's config.json; without it the configuration's facts must have its numbers.
        hardware: GPU name or TB/s; without it the configuration's ``gpu``, else ``memory_bandwidth_gb_s``.
        alpha: ``server``, arrival to queued, or ``effective``, which adds first token to first response: BLIS has no
            place for that.

    Raises:
        BlisError: a coefficient of the step time is absent, or the size of the KV cache cannot be known.
    """
    step = _features(config, "step_time")
    if not step:
        raise BlisError("step_time: nothing learned yet, so its coefficients are absent")
    kv_us = _kv_us_per_token(config, model_config, hardware)
    beta = [0.0] * N_BETAS
    prices = {name: _value(step, "step_time", name) for name in _STEP_COLUMNS}
    prices |= (experts := _fold_experts(config, step, prices)).prices
    notes, folded = [_misfit(config, prices)], _fold_prompts(config, step, prices)
    prices |= folded.prices
    for name, index in _STEP_COLUMNS.items():
        value = prices[name]
        beta[index] = value / kv_us if index in {8, 9} else value
        if not math.isfinite(beta[index]):
            raise BlisError(f"step_time: coefficient {name} is {value!r}, too large for BLIS")
    queueing = _queueing_us(config, alpha, folded.prompt_us, notes)
    fixed, per_token = _post_decode_us(config)
    ranks = config.config.get("data_parallel_size", 1)
    if ranks != 1:
        notes.append(f"data_parallel_size {ranks}: learned per rank; simulate one instance per rank")
    used = ("step_time", "api_queueing", "post_decode", *(("first_response",) if alpha == "effective" else ()))
    absent = tuple(f"{target}: nothing learned yet, taken as 0" for target in used if not _features(config, target))
    return Coefficients(
        alpha=(queueing, fixed, per_token),
        beta=tuple(beta),
        kv_us_per_token=kv_us,
        limits=_limits(config, hardware),
        warnings=(
            *experts.warnings,
            *folded.warnings,
            *_doubtful_coefficients(config, used),
            *absent,
        ),
        notes=tuple(notes),
    )


def _doubtful_coefficients(config: ConfigSnapshot, targets: Collection[str]) -> tuple[str, ...]:
    """Each coefficient of ``portable`` whose status is not ``identified``, with that and its 95 % interval."""
    lines = []
    for target in targets:
        for each in _features(config, target).values():
            value = estimate(each.coefficient, each.stderr, each.unit)
            reason = "" if each.reason is None else f", {REASONS[each.reason]}"
            if each.status != "identified":
                line = f"not identified: {target} {each.name}: {each.status}, {value}{reason}"
                lines.append(printable(line, MAX_COMMENT_CHARS))
    return tuple(lines)


class _Folded(NamedTuple):
    """``prices`` in place of the learned ones, ``prompt_us`` of the mean prompt, and what a reader has to know."""

    prices: Mapping[str, float] = {}
    prompt_us: float = 0.0
    warnings: tuple[str, ...] = ()


def _usual_steps(config: ConfigSnapshot) -> list[tuple[float, ...]]:
    """Of each shape that was seen: rows, prefill tokens, requests, tokens of decode context and microseconds."""
    shapes = config.targets["step_time"].shape_factors.values()
    return [(each.rows, *each.usual) for each in shapes if each.usual is not None and each.usual[3] > 0.0]


def _misfit(config: ConfigSnapshot, prices: Mapping[str, float]) -> str:
    """How far BLIS's line, which has no shapes, is off the usual steps without prompts and with them."""
    rows, prefill, batch, context, us = np.array(_usual_steps(config)).reshape(-1, 5).T
    columns = np.array([prefill, context, batch, np.ones_like(us)])
    off = np.abs(np.array([prices[name] for name in _STEP_COLUMNS]) @ columns / us - 1.0)
    kinds = {"steps without a prompt": prefill == 0.0, "steps with one": prefill > 0.0}
    said = [f"{kind} {np.average(off[of], weights=rows[of]):.1%}" for kind, of in kinds.items() if of.any()]
    return f"step_time by these coefficients alone, mean error: {', '.join(said) or 'not known'}"


def _fold_experts(config: ConfigSnapshot, step: Mapping[str, FeatureSnapshot], prices: Mapping[str, float]) -> _Folded:
    """The line in the batch that is nearest to what its experts cost: BLIS has no term for the share touched."""
    if ACTIVE_EXPERTS not in step:
        return _Folded()
    all_us, experts = _value(step, "step_time", ACTIVE_EXPERTS), experts_in(config.config)
    mean = step["requests"].mean or 0.0
    cells = _usual_steps(config) or [(1.0, 0.0, mean, 0.0, 1.0), (1.0, 0.0, 1.01 * mean, 0.0, 1.0)]
    rows, prefill, batch, _, us = np.array(cells).T
    if experts is None or not batch[0] > 0.0:
        raise BlisError(f"step_time: {ACTIVE_EXPERTS} needs num_experts, num_experts_per_tok and a mean batch")
    weight, share = np.sqrt(rows) / us, share_touched(*experts, prefill + batch)
    columns = np.array([batch, np.ones_like(batch)]) * weight
    slope, level = np.linalg.lstsq(columns.T, share * weight, rcond=None)[0]
    if level < 0.0:
        slope, level = columns[0] @ (share * weight) / (columns[0] @ columns[0]), 0.0
    added = {"requests": all_us * max(float(slope), 0.0), "intercept": all_us * float(level)}
    line = {name: prices[name] + us for name, us in added.items()}
    said = f"BLIS has no term for experts touched: a line in beta[5] and beta[6] has the {all_us:.4g} µs of all"
    return _Folded(line, warnings=(f"{said} for batches of {batch.min():.4g} to {batch.max():.4g} requests",))


def _fold_prompts(config: ConfigSnapshot, step: Mapping[str, FeatureSnapshot], prices: Mapping[str, float]) -> _Folded:
    """Where hits are hidden, spread the price of a prompt token over requests, and say which trace the file is for."""
    if not config.prefix_hits_hidden:
        return _Folded()
    hidden = "the telemetry hides prefix-cache hits"
    if step["prefill_tokens"].status == "prior_only":
        computed = f"{hidden}: beta[8] is a data sheet's price of a computed token, for traces with prefix_group;"
        return _Folded(warnings=(f"{computed} in one without (blis-trace), tokens that were cached are charged, too",))
    price_us = prices["prefill_tokens"]
    price = f"{hidden}: {price_us:.4g} µs per prompt token, cached or computed,"
    prompts = (_mean_of(_features(config, target), "prompt_tokens") for target in ("api_queueing", "queue_wait"))
    prompt = next(filter(None, prompts), 0.0)
    tokens, payers = step["prefill_tokens"].mean or 0.0, (step["requests"].mean or 0.0) - (prompt > 0.0)
    each_us = price_us * tokens / payers if payers > 0.0 else math.inf
    if math.isinf(each_us) or (prompt and each_us > prices["intercept"]):
        alone = "stay in beta[8], for traces without prefix_group (blis-trace) alone"
        return _Folded(warnings=(f"{price} {alone}: hardly any others run beside a request",))
    spread = {
        "prefill_tokens": 0.0,
        "requests": prices["requests"] + each_us,
        "intercept": prices["intercept"] - (each_us if prompt else 0.0),
    }
    own = f"alpha[0] at {prompt:.1f}, and for others that run into beta[5] less beta[6]"
    into = f"into {own if prompt else 'beta[5] alone, since the mean prompt is not known,'} at {each_us:.4g} µs"
    kinds = "for traces with prefix_group and without (blis-trace), of lengths like those learned from"
    return _Folded(spread, price_us * prompt, (f"{price} are folded {into}; {kinds}",))


def _limits(config: ConfigSnapshot, hardware: str | None) -> tuple[tuple[str, str], ...]:
    """Limits of the engine that BLIS needs, by the names of its flags."""
    facts = config.config
    name = blis_name_of(str(facts.get("gpu", "")) if hardware is None else hardware)
    known = [(flag, facts.get(fact)) for flag, fact in LIMIT_FLAGS.items()]
    limits = [(flag, str(value)) for flag, value in known if type(value) is int and value >= 1]
    return (*([("hardware", name)] if name else []), *limits)


def _kv_us_per_token(config: ConfigSnapshot, model_config: Mapping[str, Any] | None, hardware: str | None) -> float:
    elements = kv_elements_per_token(config.config if model_config is None else model_config)
    if elements is None:
        where = "the configuration's facts lack" if model_config is None else "the file lacks"
        needed = "num_hidden_layers, hidden_size or num_attention_heads"
        raise BlisError(
            f"--model-config: {where} {needed}; name the model's config.json, for a sidecar by its key model_config"
        )
    if hardware is None:
        hardware = str(config.config.get("gpu", ""))
        fact = config.config.get("memory_bandwidth_gb_s")
        if bandwidth_of(hardware) is None and _is_number(fact):
            hardware = str(float(fact) / 1e3)  # BLIS does not know the GPU: its user has to give it this figure
    bandwidth_tb_s = bandwidth_of(hardware)
    if bandwidth_tb_s is None:
        gpu = repr(printable(hardware)) if hardware else "an unknown GPU"
        raise BlisError(
            f"--hardware: memory bandwidth of {gpu} is not known; name one of "
            f"{', '.join(BANDWIDTH_TB_S)}, or give BwPeakTBs as a number; for a sidecar by its key gpu, or by a rule"
            " with memory_bandwidth_gb_s"
        )
    ranks = config.config.get("tensor_parallel_size", 1)
    if type(ranks) is not int or ranks < 1:
        raise BlisError(f"tensor_parallel_size: expected an integer >= 1, got {printable(str(ranks))!r}")
    return elements / ranks * BYTES_PER_KV_ELEMENT / (bandwidth_tb_s * 1e6)


def _features(config: ConfigSnapshot, target: str) -> dict[str, FeatureSnapshot]:
    """The target's portable coefficients by name; empty if nothing is learned."""
    known = config.targets.get(target)
    model = None if known is None else known.models.get("portable")
    return {} if model is None else {feature.name: feature for feature in model.features}


def _value(features: Mapping[str, FeatureSnapshot], target: str, name: str) -> float:
    feature = features.get(name)
    if feature is None:
        raise BlisError(f"{target}: coefficient {name} is absent")
    if not math.isfinite(feature.coefficient) or feature.coefficient < 0:
        raise BlisError(f"{target}: coefficient {name} is {feature.coefficient!r}; BLIS takes finite values >= 0")
    return feature.coefficient


def _queueing_us(config: ConfigSnapshot, alpha: str, prompt_us: float, notes: list[str]) -> int:
    """The constant nearest to the learned line c0 + c1 N, in the mean: its value at the mean prompt length.

    ``prompt_us``: what computing a prompt takes in the mean, where no beta charges it.
    """
    features = _features(config, "api_queueing")
    queueing_us = prompt_us + (_value(features, "api_queueing", "intercept") if features else 0.0)
    tokens = _mean_of(features, "prompt_tokens")
    if tokens and (slope := _value(features, "api_queueing", "prompt_tokens")) > 0.0:
        queueing_us += slope * tokens
        notes.append(f"api_queueing prompt_tokens: {slope!r} µs/token is in alpha[0] at the mean of {tokens:.1f}")
    responses = _features(config, "first_response") if alpha == "effective" else {}
    if responses:
        mean_us = config.targets["first_response"].mean_us
        typical_us = _value(responses, "first_response", "intercept")
        queueing_us += typical_us if mean_us is None or not math.isfinite(mean_us) else mean_us
    return _whole(queueing_us)


def _mean_of(features: Mapping[str, FeatureSnapshot], name: str) -> float:
    """Mean of a feature; 0 where it is not known."""
    return features[name].mean or 0.0 if name in features else 0.0


def _whole(value_us: float) -> int:
    """BLIS keeps times as int64; nothing near that is a latency."""
    if not 0 <= value_us <= MAX_ALPHA_US:
        raise BlisError(f"an alpha of {value_us!r} µs is no latency")
    return round(value_us)


def _post_decode_us(config: ConfigSnapshot) -> tuple[int, int]:
    """Whole (fixed, per output token) microseconds with the mean of the learned line.

    Minimises E[(c0 + c1 N - a1 - a2 N)^2] over whole a2: the error is (c1 - a2)^2 Var N once a1 takes up the difference
    at the mean of N, so a2 is the nearest whole number, or the one below where a1 would be negative.
    """
    features = _features(config, "post_decode")
    if not features:
        return 0, 0
    fixed_us = _value(features, "post_decode", "intercept")
    per_token_us = _value(features, "post_decode", "output_tokens")
    tokens = _mean_of(features, "output_tokens")
    whole = _whole(per_token_us)
    if fixed_us + (per_token_us - whole) * tokens < 0:
        whole = math.floor(per_token_us)
    return _whole(fixed_us + (per_token_us - whole) * tokens), whole


def render_flags(coefficients: Coefficients) -> bytes:
    """The flags of ``blis run`` and ``blis replay``: coefficients, which select the backend, and the known limits."""
    alpha, beta = ",".join(map(str, coefficients.alpha)), ",".join(map(_number, coefficients.beta))
    return f"--alpha-coeffs {alpha} --beta-coeffs {beta}{_flags(coefficients)}\n".encode()


def _flags(coefficients: Coefficients) -> str:
    return "".join(f" --{name} {value}" for name, value in coefficients.limits)


def render_yaml(snapshot: Snapshot, config: ConfigSnapshot, coefficients: Coefficients) -> bytes:
    """A file for ``--defaults-filepath``.

    BLIS refuses unknown keys, so everything about the numbers stands in comments.
    """
    facts = (f"{key}: {value}" for key, value in sorted(config.config.items()))
    model = config.targets["step_time"].models["portable"]
    head = [
        f"tracefit {snapshot.tracefit_version}, snapshot generation {snapshot.generation}",
        f"created_unix_nano {snapshot.created_unix_nano}, config {config.config_id}, telemetry {config.telemetry}",
        *facts,
        f"step_time rows {model.rows}, effective rows {model.effective_rows:.1f}",
        f"kv_us_per_token {coefficients.kv_us_per_token!r} (BLIS's formula and figures)",
    ]
    head.extend((*coefficients.warnings, *coefficients.notes))
    if coefficients.limits:
        head.append(f"flags that belong to it:{_flags(coefficients)}")
    head.append("pass --model-config-folder and --hardware-config: BLIS looks for them beside this file otherwise")
    lines = [f"# {printable(line, MAX_COMMENT_CHARS)}" for line in head]
    lines += [
        "version: 0.0.1",
        "defaults: {}",
        "workloads: {}",
        "trained_physics_coefficients:",
        f"  alpha_coeffs: [{', '.join(map(str, coefficients.alpha))}]",
        f"  beta_coeffs: [{', '.join(map(_number, coefficients.beta))}]",
    ]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    """Shortest text that reads back as the same number, with the dot that YAML 1.1 readers ask for."""
    return np.format_float_positional(value, trim="0") if value else "0"


def export(
    snapshot: Snapshot, config: ConfigSnapshot, file_format: str = "blis-yaml", **options: Any
) -> tuple[bytes, Coefficients]:
    """A configuration of a snapshot as ``blis-yaml`` or ``blis-flags``, and what it has, the verdict first.

    Raises:
        BlisError: as :func:`blis_coefficients`, whose ``options`` these are.
    """
    coefficients, verdict = blis_coefficients(config, **options), Advisory().verdict(snapshot, config)
    said = (f"{verdict.state}: {reason}" for reason in verdict.reasons)
    coefficients = coefficients._replace(warnings=(*said, *coefficients.warnings))
    if file_format == "blis-flags":
        return render_flags(coefficients), coefficients
    return render_yaml(snapshot, config, coefficients), coefficients


TRACE_HEADER, TRACE_TABLE = "trace.yaml", "trace.csv"
_COLUMNS = (
    "request_id client_id tenant_id slo_class session_id round_index prefix_group prefix_length streaming input_tokens "
    "output_tokens text_tokens image_tokens audio_tokens video_tokens reason_ratio model deadline_us "
    "server_input_tokens arrival_time_us send_time_us first_chunk_time_us last_chunk_time_us num_chunks status "
    "error_message finish_reason"
)
_HEADER = b"trace_version: 2\ntime_unit: microseconds\nmode: real\nwarm_up_requests: 0\n"


class TracedRequest(NamedTuple):
    """A request as the server saw it; wall clock in ns, ``first_token_unix_ns`` None where it had none."""

    arrival_unix_ns: int
    prompt_tokens: int
    output_tokens: int
    first_token_unix_ns: int | None
    end_unix_ns: int
    is_aborted: bool


def render_trace(requests: Sequence[TracedRequest]) -> dict[str, bytes]:
    """Files by name, requests in the order of their arrival; needs at least one."""
    ordered = sorted(requests, key=lambda request: (request.arrival_unix_ns, request.end_unix_ns))
    begin_unix_ns = ordered[0].arrival_unix_ns
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS.split(), restval="", lineterminator="\n")
    writer.writeheader()
    for number, request in enumerate(ordered):
        writer.writerow(_line(number, request, begin_unix_ns))
    return {TRACE_HEADER: _HEADER, TRACE_TABLE: text.getvalue().encode()}


def _line(number: int, request: TracedRequest, begin_unix_ns: int) -> dict[str, object]:
    def at_us(unix_ns: int) -> int:
        return max(unix_ns - begin_unix_ns, 0) // 1000

    arrival_us, end_us = at_us(request.arrival_unix_ns), at_us(request.end_unix_ns)
    return {
        **dict.fromkeys(("round_index", "prefix_length", "image_tokens", "audio_tokens", "video_tokens"), 0),
        "reason_ratio": "0.0",
        "request_id": number,
        "streaming": "true",
        "input_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "text_tokens": request.prompt_tokens,
        "server_input_tokens": request.prompt_tokens,
        "deadline_us": max(end_us, 1) if request.is_aborted else 0,
        "arrival_time_us": arrival_us,
        "send_time_us": arrival_us,
        "first_chunk_time_us": 0 if request.first_token_unix_ns is None else at_us(request.first_token_unix_ns),
        "last_chunk_time_us": end_us,
        "num_chunks": request.output_tokens,
        "status": "timeout" if request.is_aborted else "ok",
        "finish_reason": "abort" if request.is_aborted else "",
    }
