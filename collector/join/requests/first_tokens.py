"""ARRIVED -> FIRST_TOKEN of requests that meet a busy engine in which nobody waits for a first token.

Where spans tell queue and prefill, w = T - queue - prefill is the API's own time and the rest of a running decode step,
uniform on (0, s): the API's own time is the lower end of a uniform distribution, by its P10 and P50,

    api = w10 - 0.1 s, s = (w50 - w10) / 0.4          se = 0.354 s / sqrt(n)

(variances of sample quantiles: Kendall and Stuart, The Advanced Theory of Statistics 1, 10.10). Where they tell
neither, a request gets its first token after

    T = api + (1/2 + a + 1) s + b P        s: time of a step, its own pace   P: prompt tokens   b: of ``step_time``

half a running step, its own prefill, and a steps that were handed over before it came: a = 0 where the engine schedules
when a step ends, 1 where it schedules one ahead (asynchronous). a is the one of the two whose residuals of T on (1, P)
are smaller in the mean of their absolute values; api is the median of what remains. Microseconds.

Here se = 1.2533 * 1.4826 MAD / sqrt(n), that of a median.

Guards: 20 requests at least; steps far from the own pace (the batch that grew since) average out. A wait for a slot
does not: such requests are left out, by somebody else who waits too, or because T / s is twice the median.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from online import median_of

FIRST_TOKENS_MAX = 1024
_FIRST_TOKENS_MIN = 20
_STEPS_WAITED = 1.5
_SANE_MIN, _SANE_MAX = (1.0, 1.0, 0.0), 1e12
"""No step is shorter than a microsecond, and no request waits so long or has so many tokens."""
_WAITED_MORE = 2.0
"""In medians of T / s: who waited longer waited for something else."""


class FirstTokens(NamedTuple):
    """The API's own time, its standard error, whether the engine schedules a step ahead and how long that one is."""

    api_us: float
    stderr_us: float
    scheduled_ahead: bool = False
    step_ahead_us: float = 0.0


def explained(waits: Collection[tuple[float, float, float]], prefill_us_per_token: float) -> FirstTokens | None:
    """The formula on (T, s, P) of each request; None where they are too few."""
    told = np.array(waits, float).reshape(-1, 3)
    known = told[((told >= _SANE_MIN) & (told < _SANE_MAX)).all(axis=1)]  # false for NaN too
    if len(known) < _FIRST_TOKENS_MIN:
        return None
    steps_waited = known[:, 0] / known[:, 1]
    known = known[steps_waited <= _WAITED_MORE * median_of(steps_waited)]
    first_token_us, pace_us, prompt_tokens = known.T
    columns = np.stack((np.ones(len(known)), prompt_tokens / max(float(prompt_tokens.max()), 1.0)), axis=1)
    misfits_us = []
    for steps in (_STEPS_WAITED, _STEPS_WAITED + 1.0):
        rest_us = first_token_us - steps * pace_us
        solution, *_ = np.linalg.lstsq(columns, rest_us, rcond=None)
        misfits_us.append(float(np.abs(rest_us - columns @ solution).mean()))
    ahead = misfits_us[1] < misfits_us[0]
    rest_us = first_token_us - (_STEPS_WAITED + ahead) * pace_us - prefill_us_per_token * prompt_tokens
    api_us = median_of(rest_us)
    spread_us = 1.4826 * median_of(np.abs(rest_us - api_us))
    stderr_us = 1.2533 * spread_us / math.sqrt(len(known))
    return FirstTokens(max(api_us, 0.0), stderr_us, ahead, median_of(pace_us) if ahead else 0.0)


def told(waits_us: Collection[float]) -> FirstTokens | None:
    """The lower end of w of each request; None where they are too few."""
    if len(waits_us) < _FIRST_TOKENS_MIN:
        return None
    low_us, middle_us = np.quantile(np.array(waits_us), (0.1, 0.5)).tolist()
    step_us = (middle_us - low_us) / 0.4
    return FirstTokens(max(low_us - 0.1 * step_us, 0.0), 0.354 * step_us / math.sqrt(len(waits_us)))
