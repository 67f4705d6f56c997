"""BSR-ARD: the widest dictionary, and automatic relevance determination to prune it.

Its sources name it by its successor only, so its features are not known. Here: RECE's columns, PICF's products that
RECE lacks, and the columns that only ``physics`` has; the learner ``ard`` (:mod:`online.rls`) decides which of them the
data can tell apart. Reference: docs/systems.md, source 6; Tipping, Sparse Bayesian learning (JMLR 2001).
"""

from __future__ import annotations

from online.features.columns import Column
from online.features.sheets import Sheet
from online.rows import Target

from .base import System, column, pairs, ratio, tokens, usage
from .physics import filling, has_prefill, hinge, moved_us
from .rece import RECE, step_columns

_BSR = "BSR-ARD (source 6)"


def _step(sheet: Sheet | None) -> tuple[Column, ...] | None:
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
        Target.STEP_TIME: _step,
        Target.QUEUE_WAIT: RECE.tables[Target.QUEUE_WAIT],
        Target.API_QUEUEING: RECE.tables[Target.API_QUEUEING],
    },
)
