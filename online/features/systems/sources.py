"""The systems of the sources, one table of columns after the other: docs/systems.md has where each is from.

**The two incumbents.** blackbox and roofline.

    blackbox   step = b0 + b1 P + b2 D                       request = a0 + a1 M + a2 N
    roofline   step = prefill + decode + communication + overhead,   phase = max(flops / F, bytes / B)

blackbox was fitted by Bayesian optimisation over simulator runs; here the learner does it. P is net of prefix hits.

roofline has no coefficients in its source. Here each phase falls into ``compute`` or ``memory`` by which of the two is
longer (at the efficiencies below), and the coefficients are 1 / efficiency: two learnable numbers. Weights are read
once a step, by the phase that is there.
Reference: the removed BLIS backends ``blackbox`` and ``roofline``; Williams et al. (CACM 2009).

**PICF.** Physics-informed compositional features, eight for alpha and eight for beta.

    beta    P flops_per_token / F   P^2 / (tp F)   D kv_blocks_per_token / B   D R   P D / T^2   k D / B   T / (tp sm)
            u D
    alpha   Q    Q^2 / service_rate    p = 1 / (1 - u + eps)    p Q    M / Nb    M R / Nb    1 / Ns    chunked

service_rate = B / (kv_bytes_per_token mean batch); the mean batch is the requests running now. flops_per_token counts
all layers. P^2 / (tp F) is multiplied by the attention FLOPs per pair, D kv_blocks_per_token by the bytes of a token
times the block, and k D by the bytes of an expert, so that all are microseconds: a constant factor per configuration
that no fit within one can see. 1 / Ns and the flag are constant within a configuration. As published there is no
intercept (its reviewers ask for one); the live form has the bias of the configuration.
Reference: docs/systems.md, source 3.

**MoLE-RD.** A linear expert per regime, softly gated, with an intercept per regime.

    y = sum_r g_r(x) (c_r + sum_j beta_rj phi_rj(x))        g_r >= 0, sum_r g_r = 1, so the c_r need no other intercept

The gates depend on the raw features only, so a mixture of linear experts is linear in all its coefficients: the columns
are g_r phi_rj, and one solve on one (A, b) fits all experts together. Away from the boundaries a gate is 0 or 1 and the
fit equals a separate regression per regime; within BAND of a boundary two experts share a row by their distance to it.

beta, r = P / T, first match wins, saturation first (as written it could only be reached in the middle band):

    saturation         u > 0.9    T / B    fragmentation T    evictions block transfer time    1 / (1 - u + 0.01)
    prefill_dominated  r > 0.7    P flops_per_token / F    P^2 / (tp F)    nP    k P / F
    decode_dominated   r < 0.3    D kv_bytes_per_token / B    D R    D E / B    offload transfer time
    mixed_balanced                P / F    D / B    P D / T^2    R u

alpha:  low_load (Q <= 2) [1, M/1000]   high_pressure (u > 0.85) [1/(1-u+0.01), Q u, M u]   normal_load [Q, M/Nb, R/Ns]

Reference: docs/systems.md, source 4; Jacobs et al., Adaptive mixtures of local experts (1991). ``absent`` says what is
left out.

**Three systems over one dictionary.** RECE has it, HFD-TL a part of it in three stages, BSR-ARD all of it and more.

RECE: robust ensemble with configuration embeddings, 16 alpha and 20 beta features.

    beta    1   P flops_per_token / F   D kv_bytes_per_token / B   T/Nb   (P/Nb)^2   (D/Nb)^2   P D/Nb^2   (P/Nb) u
            D R/Nb   u   u^2   1/tp   moe k/8   offload   (tp-1) T/link   (tp-1) R   offload out/pcie
            offload in/pcie   moe ep   moe tokens per expert expert FLOPs/F
    alpha   1   q = Q/Ns   q^2   u   u^2   m = M/Lmax   m^2   q u   m u   1/tp   prefix   chunked   [tp>1]
            (tp-1) M/link   R/Ns   (R/Ns) u

Columns that a configuration makes zero (one GPU, no experts, no offload) are not there. Specialists, similarity and
coverage: :mod:`online.transfer`; quantiles: the bands (online/errors.py).

HFD-TL: base + configuration + residual, with transfer.

            base                                                             configuration             residual
    beta    P flops_per_token / F   D kv_bytes_per_token / B   T / Nb        1/tp   moe E/8   offload   1   u^2
    alpha   Q / Ns                  u                          M / Lmax      1/tp   prefix   chunked    1   (Q/Ns)^2

Stage 1 fits base and configuration on pooled donors; stage 2 keeps those and fits the residual of a new configuration
(:mod:`online.transfer`, ``frozen``), or takes them as a prior and updates everything (``prior``), which is better.
D kv_bytes_per_token reads as written: decode tokens, not their context.

BSR-ARD: its sources name it by its successor only, so its features are not known. Here: RECE's columns, PICF's products
that RECE lacks, and the columns that only ``physics`` has. The learner ``ard`` (:mod:`online.rls`) decides which of
them the data can tell apart.

References: docs/systems.md, sources 5 to 7; Tipping, Sparse Bayesian learning (JMLR 2001).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from online.constants import GEMM_EFFICIENCY
from online.features.columns import Column, Raw
from online.features.sheets import Sheet
from online.rows import Floats, Target

from .base import (
    System,
    column,
    constant,
    filling,
    has_prefill,
    hinge,
    intercept,
    moved_blocks,
    moved_us,
    pairs,
    ratio,
    tokens,
    usage,
)

# Guess: the usual share of the sheet's bandwidth; it decides only which phase is bound by what.
BANDWIDTH_EFFICIENCY = 0.80
_BLACKBOX = "BLIS blackbox backend"
_ROOFLINE = "BLIS roofline backend; Williams et al. (CACM 2009)"


def _blackbox_step(_: Sheet | None) -> tuple[Column, ...]:
    return (
        intercept(_BLACKBOX),
        column("prefill_tokens", "prefill_tokens", _BLACKBOX, "us/token"),
        column("decode_tokens", "decode_tokens", _BLACKBOX, "us/token"),
    )


def _blackbox_request(_: Sheet | None) -> tuple[Column, ...]:
    return (
        intercept(_BLACKBOX),
        column("prompt_tokens", "prompt_tokens", _BLACKBOX, "us/token"),
        column("output_tokens", "output_tokens", _BLACKBOX, "us/token"),
    )


def phases(sheet: Sheet, raw: Raw) -> tuple[Floats, Floats]:
    """Compute-bound and memory-bound time of the step at the sheet's limits, each (m,)."""
    prefill, decode, total = raw["prefill_tokens"], raw["decode_tokens"], tokens(raw)
    weights = np.where(total > 0, sheet.weight_us(total), 0.0)
    shared = np.divide(prefill, total, out=np.zeros_like(total), where=total > 0)
    compute = (
        prefill * sheet.token_us + pairs(raw) * sheet.pair_us,
        decode * sheet.token_us + raw["decode_context_tokens"] * sheet.pair_us,
    )
    memory = (
        np.where(prefill > 0, np.where(decode > 0, shared * weights, weights), 0.0) + prefill * sheet.kv_token_us,
        np.where(decode > 0, np.where(prefill > 0, (1.0 - shared) * weights, weights), 0.0)
        + sheet.kv_us(raw["decode_context_tokens"], raw["decode_requests"]),
    )
    bound = [c / GEMM_EFFICIENCY > m / BANDWIDTH_EFFICIENCY for c, m in zip(compute, memory, strict=True)]
    compute_us = sum((np.where(b, c, 0.0) for b, c in zip(bound, compute, strict=True)), np.zeros_like(total))
    memory_us = sum((np.where(b, 0.0, m) for b, m in zip(bound, memory, strict=True)), np.zeros_like(total))
    return compute_us, memory_us


def _roofline_step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    columns = [
        intercept("overhead"),
        column("compute", lambda raw: phases(sheet, raw)[0], _ROOFLINE, "us/us"),
        column("memory", lambda raw: phases(sheet, raw)[1], _ROOFLINE, "us/us"),
    ]
    link = sheet.all_reduce_us
    if link:
        columns.append(column("communication", lambda raw: tokens(raw) * link, _ROOFLINE, "us/us"))
    return tuple(columns)


def _roofline_request(_: Sheet | None) -> tuple[Column, ...]:
    return (
        intercept("BLIS roofline: alpha 0"),
        column("prompt_tokens", "prompt_tokens", "BLIS roofline: alpha 1", "us/token"),
    )


BLACKBOX = System(
    name="blackbox",
    title="the incumbent: prefill and decode tokens",
    reference="BLIS blackbox backend (source 1)",
    tables={
        Target.STEP_TIME: _blackbox_step,
        Target.QUEUE_WAIT: _blackbox_request,
        Target.API_QUEUEING: _blackbox_request,
    },
)

ROOFLINE = System(
    name="roofline",
    title="the other incumbent: data-sheet limits with two learnable efficiencies",
    reference="BLIS roofline backend (source 2)",
    tables={
        Target.STEP_TIME: _roofline_step,
        Target.QUEUE_WAIT: _roofline_request,
        Target.API_QUEUEING: _roofline_request,
    },
)

# Guard: no division by 0 at full usage.
EPSILON = 0.01
_PICF = "PICF (source 3)"


def _picf_step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    columns = [
        column("t_prefill", lambda raw: raw["prefill_tokens"] * sheet.token_us, _PICF, "us/us"),
        column("t_prefill_squared", lambda raw: raw["prefill_tokens"] ** 2 * sheet.pair_us, _PICF, "us/us"),
        column("t_decode_kv", lambda raw: raw["decode_tokens"] * sheet.kv_token_us * sheet.block_size, _PICF, "us/us"),
        column("decode_running", lambda raw: raw["decode_tokens"] * raw["running"], _PICF, "us/token*request"),
        column("mix", _mix, _PICF),
    ]
    if sheet.model.moe:
        per_token = sheet.model.experts_per_token * sheet.expert_us
        columns.append(column("t_decode_experts", lambda raw: raw["decode_tokens"] * per_token, _PICF, "us/us"))
    if sheet.sm is not None:
        width = float(sheet.tp * sheet.sm)
        columns.append(column("tokens_per_sm", lambda raw: tokens(raw) / width, _PICF, "us/token"))
    columns.append(column("usage_decode", lambda raw: usage(raw) * raw["decode_tokens"], _PICF, "us/token"))
    return tuple(columns)


def _mix(raw: Raw) -> Floats:
    return ratio(raw["prefill_tokens"] * raw["decode_tokens"], tokens(raw) ** 2)


def pressure(raw: Raw) -> Floats:
    """1 / (1 - u + eps): grows without bound as the cache fills."""
    return np.asarray(1.0 / (1.0 - np.clip(usage(raw), 0.0, 1.0) + EPSILON))


def _picf_request(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_batched_tokens is None:
        return None
    budget, seats = sheet.max_batched_tokens, sheet.max_seqs
    columns = [
        column("waiting", "waiting", _PICF, "us/request"),
        column(
            "waiting_squared",
            lambda raw: raw["waiting"] ** 2 * sheet.kv_token_us * np.maximum(raw["running"], 1.0),
            _PICF,
            "us/us",
        ),
        column("pressure", pressure, _PICF),
        column("pressure_waiting", lambda raw: pressure(raw) * raw["waiting"], _PICF, "us/request"),
        column("chunks", lambda raw: raw["prompt_tokens"] / budget, _PICF),
        column("chunks_running", lambda raw: raw["prompt_tokens"] * raw["running"] / budget, _PICF, "us/request"),
        constant("chunked", float(sheet.chunked), _PICF),
    ]
    if seats is not None:
        columns.append(constant("seat_share", 1.0 / seats, _PICF))
    return tuple(columns)


PICF = System(
    name="picf",
    title="physics-informed compositional features",
    reference="source 3",
    tables={Target.STEP_TIME: _picf_step, Target.QUEUE_WAIT: _picf_request, Target.API_QUEUEING: _picf_request},
    absent={
        "prefix hit ratio, effective prompt length (asked for by its reviewers)": (
            "what of a prompt is cached nobody knows when it is queued; prefill tokens are net of hits where steps tell"
        ),
    },
)

# Guess.
BAND = 0.05
"""Half width of the zone around a boundary in which two experts share a row."""

_MOLE = "MoLE-RD (source 4)"
RawFormula = Callable[[Raw], Floats]


def ramp(value: Floats, boundary: float, band: float = BAND) -> Floats:
    """0 below the zone, 1 above it, linear inside."""
    return np.asarray(np.clip((value - boundary) / (2.0 * band) + 0.5, 0.0, 1.0))


def step_gates(raw: Raw) -> dict[str, Floats]:
    """Weight of each beta regime, each (m,); they sum to 1. Unknown usage is NaN: the regime is not known."""
    share = ratio(raw["prefill_tokens"], tokens(raw))
    saturation = ramp(usage(raw), 0.9)
    rest = 1.0 - saturation
    prefill, decode = rest * ramp(share, 0.7), rest * (1.0 - ramp(share, 0.3))
    return {"saturation": saturation, "prefill": prefill, "decode": decode, "mixed": rest - prefill - decode}


def request_gates(raw: Raw) -> dict[str, Floats]:
    """Weight of each alpha regime; Q is a whole number, so the zone at 2 is between 2 and 3."""
    low = 1.0 - np.clip(raw["waiting"] - 2.0, 0.0, 1.0)
    high = (1.0 - low) * ramp(usage(raw), 0.85)
    return {"low": low, "high": high, "normal": 1.0 - low - high}


def _experts(
    gates: Callable[[Raw], dict[str, Floats]], experts: dict[str, dict[str, tuple[str, RawFormula]]]
) -> tuple[Column, ...]:
    def gated(regime: str, formula: RawFormula) -> RawFormula:
        def value(raw: Raw) -> Floats:
            weight = gates(raw)[regime]
            # 0 times an unknown is 0 here: an expert that is not asked need not know.
            return np.where(weight == 0.0, 0.0, weight * formula(raw))

        return value

    columns: list[Column] = []
    for regime, features in experts.items():
        columns.append(column(f"{regime}.intercept", gated(regime, lambda raw: np.ones(len(raw))), _MOLE))
        for name, (unit, formula) in features.items():
            columns.append(column(f"{regime}.{name}", gated(regime, formula), _MOLE, unit))
    return tuple(columns)


def _mole_step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    flop, byte = sheet.token_us, sheet.kv_token_us
    block = sheet.block_size
    prefill: dict[str, tuple[str, RawFormula]] = {
        "t_tok": ("us/us", lambda raw: raw["prefill_tokens"] * flop),
        "t_squared": ("us/us", lambda raw: raw["prefill_tokens"] ** 2 * sheet.pair_us),
        "requests": ("us/request", lambda raw: raw["prefill_requests"]),
    }
    decode: dict[str, tuple[str, RawFormula]] = {
        "t_kv": ("us/us", lambda raw: raw["decode_context_tokens"] * byte),
        "tokens_running": ("us/token*request", lambda raw: raw["decode_tokens"] * raw["running"]),
    }
    saturation: dict[str, tuple[str, RawFormula]] = {
        "tokens": ("us/us", lambda raw: tokens(raw) * byte),
        "fragmentation": ("us/token", lambda raw: fragmentation(raw, block) * tokens(raw)),
        "pressure": ("us", lambda raw: 1.0 / (1.0 - np.clip(usage(raw), 0.0, 1.0) + 0.01)),
    }
    if sheet.model.moe:
        prefill["experts"] = ("us/us", lambda raw: sheet.model.experts_per_token * raw["prefill_tokens"] * flop)
        decode["experts"] = ("us/us", lambda raw: sheet.model.experts * raw["decode_tokens"] * sheet.expert_us)
    host = sheet.host_bytes_per_us
    if sheet.offload and host is not None:
        transfer = block * sheet.model.kv_bytes_per_token / sheet.tp / host
        decode["offload"] = (
            "us/us",
            lambda raw: (moved_blocks(raw, "offload_blocks") + moved_blocks(raw, "restore_blocks")) * transfer,
        )
        saturation["evictions"] = ("us/us", lambda raw: moved_blocks(raw, "evicted_blocks") * transfer)
    mixed: dict[str, tuple[str, RawFormula]] = {
        "prefill": ("us/us", lambda raw: raw["prefill_tokens"] * flop),
        "decode": ("us/us", lambda raw: raw["decode_tokens"] * byte),
        "mix": ("us", lambda raw: ratio(raw["prefill_tokens"] * raw["decode_tokens"], tokens(raw) ** 2)),
        "running_usage": ("us/request", lambda raw: raw["running"] * usage(raw)),
    }
    return _experts(step_gates, {"saturation": saturation, "prefill": prefill, "decode": decode, "mixed": mixed})


def fragmentation(raw: Raw, block_size: float) -> Floats:
    """Share of the tokens' places in used blocks that hold none: the half-empty last block of each request."""
    places = raw["kv_blocks_used"] * block_size
    held = raw["decode_context_tokens"] + raw["prefill_tokens"]
    return np.asarray(np.clip(1.0 - ratio(held, places), 0.0, 1.0))


def _mole_request(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_batched_tokens is None or sheet.max_seqs is None:
        return None
    budget, seats = sheet.max_batched_tokens, sheet.max_seqs
    return _experts(
        request_gates,
        {
            "low": {"prompt": ("us", lambda raw: raw["prompt_tokens"] / 1000.0)},
            "high": {
                "pressure": ("us", lambda raw: 1.0 / (1.0 - np.clip(usage(raw), 0.0, 1.0) + 0.01)),
                "waiting_usage": ("us/request", lambda raw: raw["waiting"] * usage(raw)),
                "prompt_usage": ("us/token", lambda raw: raw["prompt_tokens"] * usage(raw)),
            },
            "normal": {
                "waiting": ("us/request", lambda raw: raw["waiting"]),
                "chunks": ("us", lambda raw: raw["prompt_tokens"] / budget),
                "seats": ("us", lambda raw: raw["running"] / seats),
            },
        },
    )


MOLE_RD = System(
    name="mole_rd",
    title="a linear expert per regime, softly gated",
    reference="source 4",
    tables={Target.STEP_TIME: _mole_step, Target.QUEUE_WAIT: _mole_request, Target.API_QUEUEING: _mole_request},
    absent={
        "prefix miss ratio (low_load)": "nobody knows it when a request is queued",
        "preemption regime": "a request's row does not say how many preemptions there were lately",
        "Q · mean service time (normal_load)": "the mean is one number per configuration: Q alone says it",
    },
    gated_intercepts=True,
)

_RECE = "RECE (source 7)"


def step_columns(sheet: Sheet, reference: str = _RECE) -> tuple[Column, ...] | None:
    """The 20 beta features, as far as this configuration has them."""
    if sheet.max_batched_tokens is None:
        return None
    budget = sheet.max_batched_tokens
    columns = [
        intercept(reference),
        column("t_prefill", lambda raw: raw["prefill_tokens"] * sheet.token_us, reference, "us/us"),
        column("t_decode_kv", lambda raw: raw["decode_tokens"] * sheet.kv_token_us, reference, "us/us"),
        column("budget_share", lambda raw: tokens(raw) / budget, reference),
        column("prefill_squared", lambda raw: (raw["prefill_tokens"] / budget) ** 2, reference),
        column("decode_squared", lambda raw: (raw["decode_tokens"] / budget) ** 2, reference),
        column("prefill_decode", lambda raw: raw["prefill_tokens"] * raw["decode_tokens"] / budget**2, reference),
        column("prefill_usage", lambda raw: raw["prefill_tokens"] / budget * usage(raw), reference),
        column("decode_running", lambda raw: raw["decode_tokens"] * raw["running"] / budget, reference, "us/request"),
        column("usage", usage, reference),
        column("usage_squared", lambda raw: usage(raw) ** 2, reference),
        constant("inverse_tp", 1.0 / sheet.tp, reference),
        constant("experts_per_token", sheet.model.experts_per_token / 8.0, reference),
        constant("offload", float(sheet.offload), reference),
        constant("expert_parallel", float(sheet.model.moe * sheet.expert_parallel), reference),
        *_links(sheet, reference),
    ]
    if sheet.model.moe:
        per_expert = sheet.model.experts_per_token / sheet.model.experts
        flops_us = sheet.model.expert_flops_per_token / sheet.tp / sheet.flops_per_us
        columns.append(column("t_experts", lambda raw: tokens(raw) * per_expert * flops_us, reference, "us/us"))
    return tuple(columns)


def _links(sheet: Sheet, reference: str) -> list[Column]:
    columns: list[Column] = []
    peers, link, host = sheet.tp - 1, sheet.link_bytes_per_us, sheet.host_bytes_per_us
    if peers and link is not None:
        token_us = peers * sheet.model.hidden * 2.0 * sheet.model.layers / link
        columns.append(column("t_link", lambda raw: tokens(raw) * token_us, reference, "us/us"))
        columns.append(column("link_running", lambda raw: raw["running"] * peers, reference, "us/request"))
    if sheet.offload and host is not None:
        block_us = sheet.block_size * sheet.model.kv_bytes_per_token / sheet.tp / host
        columns.append(
            column("t_offload", lambda raw: moved_blocks(raw, "offload_blocks") * block_us, reference, "us/us")
        )
        columns.append(
            column("t_restore", lambda raw: moved_blocks(raw, "restore_blocks") * block_us, reference, "us/us")
        )
    return columns


def _rece_request(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_seqs is None or sheet.max_model_len is None:
        return None
    seats, longest = sheet.max_seqs, sheet.max_model_len
    columns = [
        intercept(_RECE),
        column("queue", lambda raw: raw["waiting"] / seats, _RECE),
        column("queue_squared", lambda raw: (raw["waiting"] / seats) ** 2, _RECE),
        column("usage", usage, _RECE),
        column("usage_squared", lambda raw: usage(raw) ** 2, _RECE),
        column("prompt", lambda raw: raw["prompt_tokens"] / longest, _RECE),
        column("prompt_squared", lambda raw: (raw["prompt_tokens"] / longest) ** 2, _RECE),
        column("queue_usage", lambda raw: raw["waiting"] / seats * usage(raw), _RECE),
        column("prompt_usage", lambda raw: raw["prompt_tokens"] / longest * usage(raw), _RECE),
        column("seats", lambda raw: raw["running"] / seats, _RECE),
        column("seats_usage", lambda raw: raw["running"] / seats * usage(raw), _RECE),
        constant("inverse_tp", 1.0 / sheet.tp, _RECE),
        constant("prefix", float(sheet.prefix), _RECE),
        constant("chunked", float(sheet.chunked), _RECE),
        constant("several_gpus", float(sheet.tp > 1), _RECE),
    ]
    if sheet.tp > 1 and sheet.link_bytes_per_us is not None:
        token_us = (sheet.tp - 1) * sheet.model.hidden * 2.0 * sheet.model.layers / sheet.link_bytes_per_us
        columns.append(column("t_link", lambda raw: raw["prompt_tokens"] * token_us, _RECE, "us/us"))
    return tuple(columns)


RECE = System(
    name="rece",
    title="quantile ensemble with configuration embeddings",
    reference="source 7",
    tables={
        Target.STEP_TIME: lambda sheet: None if sheet is None else step_columns(sheet),
        Target.QUEUE_WAIT: _rece_request,
        Target.API_QUEUEING: _rece_request,
    },
)


RESIDUAL = frozenset({"intercept", "usage_squared", "queue_squared"})
"""Columns of stage 2."""

_HFD = "HFD-TL (source 5)"


def _hfd_step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_batched_tokens is None:
        return None
    budget = sheet.max_batched_tokens
    return (
        intercept(_HFD),
        column("t_prefill", lambda raw: raw["prefill_tokens"] * sheet.token_us, _HFD, "us/us"),
        column("t_decode_kv", lambda raw: raw["decode_tokens"] * sheet.kv_token_us, _HFD, "us/us"),
        column("budget_share", lambda raw: tokens(raw) / budget, _HFD),
        column("usage_squared", lambda raw: usage(raw) ** 2, _HFD),
        constant("inverse_tp", 1.0 / sheet.tp, _HFD),
        constant("experts", sheet.model.experts / 8.0, _HFD),
        constant("offload", float(sheet.offload), _HFD),
    )


def _hfd_request(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_seqs is None or sheet.max_model_len is None:
        return None
    seats, longest = sheet.max_seqs, sheet.max_model_len
    return (
        intercept(_HFD),
        column("queue", lambda raw: raw["waiting"] / seats, _HFD),
        column("usage", usage, _HFD),
        column("prompt", lambda raw: raw["prompt_tokens"] / longest, _HFD),
        column("queue_squared", lambda raw: (raw["waiting"] / seats) ** 2, _HFD),
        constant("inverse_tp", 1.0 / sheet.tp, _HFD),
        constant("prefix", float(sheet.prefix), _HFD),
        constant("chunked", float(sheet.chunked), _HFD),
    )


HFD_TL = System(
    name="hfd_tl",
    title="base, configuration and residual, with transfer",
    reference="source 5",
    tables={Target.STEP_TIME: _hfd_step, Target.QUEUE_WAIT: _hfd_request, Target.API_QUEUEING: _hfd_request},
)


_BSR = "BSR-ARD (source 6)"


def _bsr_step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    base = step_columns(sheet, _BSR)
    if base is None:
        return None
    experts = (
        column("t_experts_read", lambda raw: sheet.experts_us(tokens(raw)), _BSR, "us/us"),
        column("tokens_to_32", filling, _BSR, "us/token"),
    )
    return (
        *base,
        *(experts if sheet.model.moe else ()),
        column("has_prefill", has_prefill, _BSR),
        column("hinge", lambda raw: hinge(sheet, tokens(raw)), _BSR, "us/us"),
        column("t_kv", lambda raw: moved_us(sheet, raw), _BSR, "us/us"),
        column("t_pfattn", lambda raw: pairs(raw) * sheet.pair_us, _BSR, "us/us"),
        column("requests", "requests", _BSR, "us/request"),
        column("mix", lambda raw: ratio(raw["prefill_tokens"] * raw["decode_tokens"], tokens(raw) ** 2), _BSR),
        column("usage_decode", lambda raw: usage(raw) * raw["decode_tokens"], _BSR, "us/token"),
    )


BSR_ARD = System(
    name="bsr_ard",
    title="sparse Bayesian regression over the widest dictionary",
    reference="source 6",
    tables={
        Target.STEP_TIME: _bsr_step,
        Target.QUEUE_WAIT: RECE.tables[Target.QUEUE_WAIT],
        Target.API_QUEUEING: RECE.tables[Target.API_QUEUEING],
    },
)
