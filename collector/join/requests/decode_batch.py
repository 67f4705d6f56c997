"""The decode batch at any time, out of the requests whose first and last token are known (see occupancy.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collector.decode import RequestSpan
from online import Floats
from online.state import saved


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A finished request that others may overlap; times in seconds since the sequence's epoch."""

    STATE = saved("request")

    first_s: float
    last_s: float
    prompt_tokens: float
    output_tokens: int
    end_unix_ns: int
    span: RequestSpan


class DecodeBatch:
    """n(t), C(t) and cumulative prefill as sums over requests sorted by first and by last token."""

    def __init__(self, requests: list[HeldRequest]) -> None:
        first = np.array([r.first_s for r in requests])
        last = np.array([r.last_s for r in requests])
        prompt = np.array([r.prompt_tokens for r in requests])
        tokens = np.array([r.output_tokens for r in requests], float)
        rate = np.where(last > first, (tokens - 1) / np.maximum(last - first, 1e-9), 0.0)
        decoding = tokens > 1
        starts = np.argsort(first, kind="stable")
        self._prefill_at = first[starts]
        self._prefill_tokens = np.concatenate(([0.0], np.cumsum(prompt[starts])))
        entering = starts[decoding[starts]]
        leaving = np.argsort(last, kind="stable")
        leaving = leaving[decoding[leaving]]
        self._enter = _Side(first[entering], (prompt + 0.5 - rate * first)[entering], rate[entering])
        self._leave = _Side(last[leaving], (prompt + 0.5 - rate * first)[leaving], rate[leaving])

    def decoding(self, at_s: Floats) -> tuple[Floats, Floats]:
        """(requests, context tokens) of the decode batch at these times."""
        entered, left = self._enter.until(at_s), self._leave.until(at_s)
        context = (entered.constant - left.constant) + at_s * (entered.rate - left.rate)
        return entered.count - left.count, context

    def prefill(self, edges_s: Floats) -> tuple[Floats, Floats]:
        """(requests, tokens) whose first token falls between consecutive edges."""
        index = np.searchsorted(self._prefill_at, edges_s, side="right")
        return np.diff(index).astype(float), np.diff(self._prefill_tokens[index])


@dataclass(frozen=True, slots=True)
class _Totals:
    count: Floats
    constant: Floats
    rate: Floats


class _Side:
    def __init__(self, at_s: Floats, constant: Floats, rate: Floats) -> None:
        self._at_s = at_s
        self._constant = np.concatenate(([0.0], np.cumsum(constant)))
        self._rate = np.concatenate(([0.0], np.cumsum(rate)))

    def until(self, at_s: Floats) -> _Totals:
        index = np.searchsorted(self._at_s, at_s, side="left")
        return _Totals(index.astype(float), self._constant[index], self._rate[index])
