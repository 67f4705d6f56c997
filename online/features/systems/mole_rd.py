"""MoLE-RD: a linear expert per regime, softly gated, with an intercept per regime.

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
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from online.features.columns import Column, Raw
from online.features.sheets import Sheet
from online.rows import Floats, Target

from .base import System, column, moved_blocks, ratio, tokens, usage

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


def _step(sheet: Sheet | None) -> tuple[Column, ...] | None:
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


def _request(sheet: Sheet | None) -> tuple[Column, ...] | None:
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
    tables={Target.STEP_TIME: _step, Target.QUEUE_WAIT: _request, Target.API_QUEUEING: _request},
    absent={
        "prefix miss ratio (low_load)": "nobody knows it when a request is queued",
        "preemption regime": "a request's row does not say how many preemptions there were lately",
        "Q · mean service time (normal_load)": "the mean is one number per configuration: Q alone says it",
    },
    gated_intercepts=True,
)
