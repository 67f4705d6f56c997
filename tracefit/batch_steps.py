"""Mean steps of a batch of n requests: what decodes wait for, and what a prefill takes.

The sum over all compositions (pi_i, mu_j: prefills.py), every step by its own shape and those
beside it (near_steps.py); c is the mean context of a request that decodes:

    s_j  = step(p mu_j, n - j + ceil(q mu_j), (n - j) c)
    ITL  = sum pi_i s_i        k = sum pi_i k_(i+1),  k_j = j / mu_j        k V = sum pi_i k_(i+1) s_(i+1)

Where they come from rows that cover many steps each (request spans, journeys, pages), the coefficients are those of a
step all the same, for they are fitted to sums; the factor of a mean step's cell is not one of the steps in it, and none
is applied.

    E s² / 2 E s            what is left of the step that an arrival meets, s_i with pi_i
    q chunks, q > 1         all but the last one are full: k V and the rest of a step are at least what they are for a
                            prompt of q - 1 full chunks
    prefills fill steps     k V has the wait for its turn in it; of the rest of a step, and of one scheduled ahead, only
                            as much is added as keeps TTFT from falling below that of the prompt which just fills them

Microseconds. Bands: the same sums over lower and upper ends.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .prefills import Prefills
from .shape_table import Band
from .step_model import StepModel
from .workload import Workload, made


class Batch(NamedTuple):
    """Mean steps of one batch.

    ``itl`` is a step that decodes wait for, ``prefill`` all of the ``k`` steps that a prefill takes. ``rest_us`` is
    what is left of the step that an arrival meets, ``ahead_us`` the step that was scheduled behind it. ``pieces`` are
    prefill tokens of the steps that were asked for.
    """

    itl: Band
    prefill: Band
    k: float
    rest_us: float
    ahead_us: float
    prefill_bound: bool
    pieces: tuple[float, ...]

    def blended(self, other: Batch, part: float) -> Batch:
        """``part`` of the way to the other."""

        def between(a: float, b: float) -> float:
            return a + part * (b - a)

        def band_between(a: Band, b: Band) -> Band:
            return between(a[0], b[0]), between(a[1], b[1]), between(a[2], b[2])

        return Batch(
            band_between(self.itl, other.itl),
            band_between(self.prefill, other.prefill),
            between(self.k, other.k),
            between(self.rest_us, other.rest_us),
            between(self.ahead_us, other.ahead_us),
            self.prefill_bound or other.prefill_bound,
            self.pieces,
        )


def batch_of(steps: StepModel, work: Workload, n: float, *, ahead: bool) -> Batch:
    """The mean steps of n requests; ``ahead``: the engine hands over a step before the last one ended."""
    whole = int(n)
    batch = _whole_batch(steps, work, whole, ahead=ahead)
    return batch.blended(_whole_batch(steps, work, whole + 1, ahead=ahead), n - whole) if n > whole else batch


def _whole_batch(steps: StepModel, work: Workload, n: int, *, ahead: bool) -> Batch:
    prefills = Prefills(n, work.output, work.uncached, steps.budget)
    itl, prefill, k, rest_us = _cut(steps, work, n, work.uncached)
    ahead_us = itl[0] if ahead and n > 1 else 0.0
    if prefills.bound:
        filled_itl, filled, _, filled_rest_us = _cut(steps, work, n, prefills.tokens_bound)
        spare_us = max(filled[0] + filled_rest_us + (filled_itl[0] if ahead and n > 1 else 0.0) - prefill[0], 0.0)
        rest_us = min(filled_rest_us, spare_us)
        ahead_us = spare_us - rest_us
    if steps.of_means:
        pieces: tuple[float, ...] = (work.uncached * prefills.ended(prefills.mean()),)
    else:
        pieces = (work.uncached / k, 0.0) if work.output > 1.0 else (work.uncached / k,)
    return made(Batch, (itl, prefill, k, rest_us, ahead_us, prefills.bound, pieces))


def _cut(steps: StepModel, work: Workload, n: int, tokens: float) -> tuple[Band, Band, float, float]:
    """ITL, k V, k, and what is left of the step that an arrival meets, with so many tokens to prefill in chunks."""
    prefills = Prefills(n, work.output, tokens, steps.budget)
    itl, prefill, k, rest_us = _sums(steps, prefills, tokens, work.context)
    if prefills.chunks > 1:
        full = (prefills.chunks - 1) * prefills.room
        _, least, _, least_rest_us = _sums(steps, Prefills(n, work.output, full, steps.budget), full, work.context)
        prefill, rest_us = max(prefill, least), max(rest_us, least_rest_us)
    return itl, prefill, k, rest_us if n > 1 else 0.0


def _sums(steps: StepModel, prefills: Prefills, tokens: float, context: float) -> tuple[Band, Band, float, float]:
    """ITL, k V, k, and the mean rest of a step."""
    n, band, factor = prefills.requests, steps.near.band, steps.mean_factor

    def step(j: float) -> Band:
        ended = prefills.ended(j)
        started = min(j, math.ceil(prefills.chunks * ended))
        return band(tokens * ended, n - j + started, (n - j) * context, n - j)

    low = high = middle = prefill_us = prefill_low = prefill_high = k = square = 0.0
    following, following_times = -1.0, (0.0, 0.0, 0.0)
    for j, share in prefills.shares():
        times = following_times if j == following else step(j)
        following, following_times = j + 1.0, step(j + 1.0)
        k += (turns := share * following / prefills.ended(following))
        middle += share * times[0]
        low += share * times[1]
        high += share * times[2]
        prefill_us += turns * following_times[0]
        prefill_low += turns * following_times[1]
        prefill_high += turns * following_times[2]
        square += share * times[0] * times[0]
    rest_us = factor * square / (2.0 * middle) if middle > 0.0 else 0.0
    itl = (middle * factor, low * factor, high * factor)
    return itl, (prefill_us * factor, prefill_low * factor, prefill_high * factor), k, rest_us
