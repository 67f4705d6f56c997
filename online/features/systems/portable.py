"""portable, as one system beside the others: raw tokens and requests, no sheet needed, no column constant.

It is registered by :mod:`online.features.registry` already; here it is a table like the rest, so that it can be pooled
and compared. Reference: the basis of BLIS's trained-physics backend.
"""

from __future__ import annotations

from collections.abc import Callable

from online.features.columns import Column
from online.features.registry import portable
from online.features.sheets import Sheet
from online.rows import Target

from .base import System


def _table(target: Target) -> Callable[[Sheet | None], tuple[Column, ...]]:
    return lambda sheet: portable(target, {} if sheet is None else sheet.model.expert_facts).columns


PORTABLE = System(
    name="portable",
    title="tokens, context and requests: what every consumer understands",
    reference="BLIS trained-physics basis",
    tables={target: _table(target) for target in Target},
)
