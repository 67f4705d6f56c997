"""Three systems over one dictionary: RECE has it, HFD-TL a part of it in three stages, BSR-ARD all of it and more.

RECE: robust ensemble with configuration embeddings, 16 alpha and 20 beta features.

    beta    1   P flops_per_token / F   D kv_bytes_per_token / B   T/Nb   (P/Nb)^2   (D/Nb)^2   P D/Nb^2   (P/Nb) u
            D R/Nb   u   u^2   1/tp   moe k/8   offload   (tp-1) T/link   (tp-1) R latency   offload out/pcie
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

from online.features.columns import Column
from online.features.sheets import Sheet
from online.rows import Target

from .base import System, column, constant, intercept, moved_blocks, pairs, ratio, tokens, usage
from .physics import filling, has_prefill, hinge, moved_us

# Guess: no fit within one configuration sees it.
LINK_LATENCY_US = 9.0
"""Latency of a small all-reduce over NVLink; a constant factor within one configuration."""

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
        latency = peers * LINK_LATENCY_US
        columns.append(column("link_running", lambda raw: raw["running"] * latency, reference, "us/us"))
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
