"""What is left of the step that a request meets, for a caller who saw when the engine last gave a token.

Tokens leave where a step ends. A request needs D for the way in and a token needs it for the way out, both together
what TTFT has outside of the steps (api_queueing + first_response); so a request sent t after a token came back reaches
the engine t + D after the end of that token's step, and of the step that runs then

    phi = (t + D) / s mod 1                    is over; s: length of a step as arrivals meet them, E s² / E s
    r   = 1 - phi                              is left, in parts of s

Where one step ends and the next begins, a little more or less time is a whole step. With phi known to ± h only, r is
the mean over that range, which runs into 1/2 as h grows to 1/2: then nothing is known, and half a step is left.

    r = 1/2 + phi (1 / 2h - 1)                 phi < h, and 1 - r of it for 1 - phi < h
    h = 0.15 + 0.02 m + v sqrt(1 + m)          at most 1/2; m = t / s steps since the token, whose count drifts, and
                                               v² = s / E s - 1: steps differ, where long prefills are among them

Microseconds. The band is r ± h, all of the step near its ends. Guards: s >= E s > 0, t >= 0.

Reference: residual life of a renewal process (Cox, Renewal Theory, 1962), given its age.
"""

from __future__ import annotations

import math

from .shape_table import Band

_UNSURE = 0.15
_UNSURE_PER_STEP = 0.02
_NOTHING_KNOWN = 0.5


def rest_of_step(length_us: float, mean_us: float, since_token_us: float, outside_us: float) -> Band:
    """us, low and high of what is left of the running step; ``length_us`` as arrivals meet it, ``mean_us`` of all."""
    steps, varied = since_token_us / length_us, max(length_us / mean_us - 1.0, 0.0)
    unsure = min(_NOTHING_KNOWN, _UNSURE + _UNSURE_PER_STEP * steps + math.sqrt(varied * (1.0 + steps)))
    if unsure == _NOTHING_KNOWN:
        return 0.5 * length_us, 0.0, length_us
    phase = (since_token_us + outside_us) / length_us % 1.0
    if unsure <= phase <= 1.0 - unsure:
        left = 1.0 - phase
        return length_us * left, length_us * (left - unsure), length_us * (left + unsure)
    towards = 0.5 / unsure - 1.0
    left = 0.5 + phase * towards if phase < unsure else 0.5 - (1.0 - phase) * towards
    return length_us * left, 0.0, length_us
