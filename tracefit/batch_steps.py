"""Mean steps of a batch of n requests: what decodes wait for, and what a prefill takes.

Where coefficients come from single steps, the sum over all compositions (pi_i, mu_j: prefills.py), every step with the
factor of its own shape and of those beside it (near_steps.py); c is the mean context of a request that decodes:

    s_j  = step(p mu_j, n - j + ceil(q mu_j), (n - j) c)
    ITL  = sum pi_i s_i        k = sum pi_i k_(i+1),  k_j = j / mu_j        k V = sum pi_i k_(i+1) s_(i+1)

Where they come from rows that cover many steps each, what was learned is the mean step and its shape, so it is asked
for that one: with m = the mean of i,

    ITL  = s_m                 k = k_(m+1)                                  k V = k s_(m+1), with the shape of s_m

and a shape between the middles of the cells that mean steps were seen in (mean_shapes.py).

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
    if steps.of_means:
        return _mean_batch(steps, work, n, ahead=ahead)
    whole = int(n)
    batch = _summed_batch(steps, work, whole, ahead=ahead)
    return batch.blended(_summed_batch(steps, work, whole + 1, ahead=ahead), n - whole) if n > whole else batch


def _summed_batch(steps: StepModel, work: Workload, n: int, *, ahead: bool) -> Batch:
    prefills, band = _prefills(steps, work, n), steps.near.band

    def step(j: float) -> Band:
        ended = prefills.ended(j)
        started = min(j, math.ceil(prefills.chunks * ended))
        return band(work.uncached * ended, n - j + started, (n - j) * work.context, n - j)

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
    factor = steps.mean_factor
    itl = (middle * factor, low * factor, high * factor)
    prefill = (prefill_us * factor, prefill_low * factor, prefill_high * factor)
    rest_us = factor * square / (2.0 * middle) if middle > 0.0 else 0.0
    pieces = (work.uncached / k, 0.0) if work.output > 1.0 else (work.uncached / k,)
    return _waited(itl, prefill, k, rest_us, prefills, pieces, ahead=ahead)


def _mean_batch(steps: StepModel, work: Workload, n: float, *, ahead: bool) -> Batch:
    prefills = _prefills(steps, work, n)
    others = prefills.mean()
    own, ended, chunks = others + 1.0, prefills.ended(others), prefills.chunks
    tokens, own_ended = work.uncached * ended, prefills.ended(own)
    shape = steps.mean_shape(tokens, n)
    itl = steps.band(tokens, n - others + chunks * ended, (n - others) * work.context, shape)
    one = steps.band(work.uncached * own_ended, n - own + chunks * own_ended, (n - own) * work.context, shape)
    k = own / own_ended
    prefill = (k * one[0], k * one[1], k * one[2])
    return _waited(itl, prefill, k, 0.5 * itl[0], prefills, (tokens,), ahead=ahead)


def _prefills(steps: StepModel, work: Workload, n: float) -> Prefills:
    return Prefills(n, work.output, work.uncached, steps.budget)


def _waited(
    itl: Band, prefill: Band, k: float, rest_us: float, prefills: Prefills, pieces: tuple[float, ...], *, ahead: bool
) -> Batch:
    bound = prefills.bound  # then k is nearly all of the wait
    if prefills.requests <= 1.0 or bound:
        return made(Batch, (itl, prefill, k, 0.0, 0.0, bound, pieces))
    return made(Batch, (itl, prefill, k, rest_us, itl[0] if ahead else 0.0, bound, pieces))
