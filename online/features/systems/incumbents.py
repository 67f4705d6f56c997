"""The two incumbents: blackbox and roofline.

    blackbox   step = b0 + b1 P + b2 D                       request = a0 + a1 M + a2 N
    roofline   step = prefill + decode + communication + overhead,   phase = max(flops / F, bytes / B)

blackbox was fitted by Bayesian optimisation over simulator runs; here the learner does it. P is net of prefix hits.

roofline has no coefficients in its source. Here each phase falls into ``compute`` or ``memory`` by which of the two is
longer (at the efficiencies below), and the coefficients are 1 / efficiency: two learnable numbers. Weights are read
once a step, by the phase that is there.
Reference: the removed BLIS backends ``blackbox`` and ``roofline``; Williams et al. (CACM 2009).
"""

from __future__ import annotations

import numpy as np

from online.constants import GEMM_EFFICIENCY
from online.features.columns import Column, Raw
from online.features.sheets import Sheet
from online.rows import Floats, Target

from .base import System, column, intercept, pairs, tokens

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
