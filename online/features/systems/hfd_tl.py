"""HFD-TL: base + configuration + residual, with transfer.

            base                                                             configuration             residual
    beta    P flops_per_token / F   D kv_bytes_per_token / B   T / Nb        1/tp   moe E/8   offload   1   u^2
    alpha   Q / Ns                  u                          M / Lmax      1/tp   prefix   chunked    1   (Q/Ns)^2

Stage 1 fits base and configuration on pooled donors; stage 2 keeps those and fits the residual of a new configuration
(:mod:`online.transfer`, ``frozen``), or takes them as a prior and updates everything (``prior``), which is better.
D kv_bytes_per_token reads as written: decode tokens, not their context. Reference: docs/systems.md, source 5.
"""

from __future__ import annotations

from online.features.columns import Column
from online.features.sheets import Sheet
from online.rows import Target

from .base import System, column, constant, intercept, tokens, usage

RESIDUAL = frozenset({"intercept", "usage_squared", "queue_squared"})
"""Columns of stage 2."""

_HFD = "HFD-TL (source 5)"


def _step(sheet: Sheet | None) -> tuple[Column, ...] | None:
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


def _request(sheet: Sheet | None) -> tuple[Column, ...] | None:
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
    tables={Target.STEP_TIME: _step, Target.QUEUE_WAIT: _request, Target.API_QUEUEING: _request},
)
