"""Requests as a router sees them: what it knows when one arrives, and what the request then met and took.

Of the others at the arrival A_i, F first and E last token, N output tokens:

    running   #{j : F_j <= A_i < E_j}           waiting   #{j : A_j < A_i < F_j}
    tokens so far   sum over the running of N_j (A_i - F_j) / (E_j - F_j)
    KV usage        (their prompts + tokens so far) / capacity, 0 where nobody said the capacity

What a request met while it decoded is the mean of #{j : F_j <= t < E_j} over F_i <= t < E_i, itself included. Counted
from the spans of finished requests: those that never ended are missing in all columns alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from online import Floats, Ints

ROUTER_FEATURES = ("prompt tokens", "running", "waiting", "KV usage", "prefix share", "tokens so far")


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One finished request; wall clock ns, ``delivered`` of its span."""

    arrived_ns: int
    first_token_ns: int
    last_token_ns: int
    delivered_ns: int
    prompt_tokens: int
    output_tokens: int
    engine: int = 0


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """Many of them by column, in order of arrival; times in seconds."""

    arrived_s: Floats
    first_s: Floats
    last_s: Floats
    delivered_ns: Ints
    prompt_tokens: Floats
    output_tokens: Floats
    engine: Ints

    def __len__(self) -> int:
        return len(self.arrived_s)

    @property
    def ttft_us(self) -> Floats:
        """From arrival to first token."""
        return 1e6 * (self.first_s - self.arrived_s)

    @property
    def tpot_us(self) -> Floats:
        """Between tokens; of answers of a single token 0."""
        return 1e6 * (self.last_s - self.first_s) / np.maximum(self.output_tokens - 1.0, 1.0)

    def met_at_arrival(self, kv_tokens: float) -> Floats:
        """``ROUTER_FEATURES`` of each; the prefix share is in no span and stays 0."""
        return self._by_engine(lambda own: _met_at_arrival(own, kv_tokens))

    def met_while_decoding(self) -> Floats:
        """Mean number in the batch over each request's own time in it, at least itself."""
        return self._by_engine(_met_while_decoding)

    def _by_engine(self, met: Callable[[ServedRequests], Floats]) -> Floats:
        """What each met among the requests of its own engine."""
        out = met(self)
        for engine in np.unique(self.engine).tolist() if len(self) and np.ptp(self.engine) else ():
            own = self.engine == engine
            out[own] = met(ServedRequests(*(getattr(self, column.name)[own] for column in fields(self))))
        return out


def by_column(requests: Sequence[ServedRequest]) -> ServedRequests:
    """Their columns, on a clock that begins with the first arrival."""
    usable = [each for each in requests if each.arrived_ns < each.first_token_ns <= each.last_token_ns]
    usable.sort(key=lambda each: (each.arrived_ns, each.delivered_ns))
    stamps = [(each.arrived_ns, each.first_token_ns, each.last_token_ns, each.delivered_ns) for each in usable]
    columns = np.array(stamps, np.int64).reshape(-1, 4)
    epoch_ns = columns[0, 0] if len(columns) else 0
    seconds = (columns[:, :3] - epoch_ns) / 1e9
    return ServedRequests(
        seconds[:, 0],
        seconds[:, 1],
        seconds[:, 2],
        columns[:, 3],
        np.array([each.prompt_tokens for each in usable], float),
        np.array([each.output_tokens for each in usable], float),
        np.array([each.engine for each in usable], np.int64),
    )


def _met_at_arrival(served: ServedRequests, kv_tokens: float) -> Floats:
    starts, ends = np.sort(served.first_s), np.sort(served.last_s)
    running = np.searchsorted(starts, served.arrived_s, "right") - np.searchsorted(ends, served.arrived_s, "right")
    before = np.searchsorted(served.arrived_s, served.arrived_s, "left")
    waiting = before - np.searchsorted(starts, served.arrived_s, "right")
    held, so_far = _held_at(served, served.arrived_s)
    usage = (held + so_far) / kv_tokens if kv_tokens else np.zeros(len(served))
    known = (served.prompt_tokens, running, np.maximum(waiting, 0), usage, np.zeros(len(served)), so_far)
    return np.stack(known, axis=1).astype(float)


def _met_while_decoding(served: ServedRequests) -> Floats:
    at = np.concatenate((served.first_s, served.last_s))
    order = np.argsort(at, kind="stable")
    at, step = at[order], np.repeat((1.0, -1.0), len(served))[order]
    number = np.cumsum(step)
    area = np.concatenate(([0.0], np.cumsum(number[:-1] * np.diff(at))))

    def until(time_s: Floats) -> Floats:
        index = np.clip(np.searchsorted(at, time_s, "right") - 1, 0, len(at) - 1)
        return area[index] + number[index] * (time_s - at[index])

    span_s = np.maximum(served.last_s - served.first_s, 1e-9)
    return np.maximum((until(served.last_s) - until(served.first_s)) / span_s, 1.0)


def _held_at(served: ServedRequests, times_s: Floats) -> tuple[Floats, Floats]:
    """Prompt tokens, and tokens made so far, of those that run at each time."""
    rate = served.output_tokens / np.maximum(served.last_s - served.first_s, 1e-9)

    def summed(values: Floats) -> Floats:
        begun, over = np.argsort(served.first_s, kind="stable"), np.argsort(served.last_s, kind="stable")
        in_all = np.concatenate(([0.0], np.cumsum(values[begun])))
        left = np.concatenate(([0.0], np.cumsum(values[over])))
        index = np.searchsorted(served.first_s[begun], times_s, "right")
        return in_all[index] - left[np.searchsorted(served.last_s[over], times_s, "right")]

    so_far = times_s * summed(rate) - summed(rate * served.first_s)
    return np.maximum(summed(served.prompt_tokens), 0.0), np.maximum(so_far, 0.0)
