"""Ask what tracefit learned: what a step costs, what requests see, how many fit. Standard library only.

    >>> import tracefit
    >>> snapshot = tracefit.load(EXAMPLE)              # a path, a URL (http://host:9464) or bytes
    >>> config = snapshot.config(model="llama")
    >>> step = config.step_time(prefill_tokens=512, requests=20, decode_context_tokens=30_000)
    >>> f"{step.us:.0f} us, 8 of 10 within {step.low:.0f} to {step.high:.0f}, usable: {step.usable}"
    '35679 us, 8 of 10 within 33895 to 38176, usable: True'

What lies outside of what was learned from is named:

    >>> config.step_time(requests=125, decode_context_tokens=125_000).extrapolated
    ('requests', 'shape')

What 20 chats of 2,000 prompt and 300 output tokens see, and how many fit 30 ms between tokens:

    >>> seen = config.request(prompt_tokens=2000, output_tokens=300, concurrency=20)
    >>> f"TTFT {seen.ttft.ms:.0f} ms, ITL {seen.itl.ms:.1f} ms, {seen.output_tokens_per_s:.0f} tokens/s"
    'TTFT 129 ms, ITL 20.5 ms, 958 tokens/s'
    >>> plan = config.plan(prompt_tokens=2000, output_tokens=300, itl_ms=30, ttft_ms=1000)
    >>> plan.concurrency, plan.limit
    (34, 'itl')

Every error is a :class:`TracefitError` whose text is one sentence:

    >>> config.step_time(requests=-1)
    Traceback (most recent call last):
    tracefit.exceptions.BadInputError: requests: expected 0 to 1e+06, got -1

Times are microseconds. The package imports nothing but the standard library and may be copied into another program.
"""

from __future__ import annotations

from .changes import ConfigDiff, Diff, Move, TypicalStep
from .configured import Config
from .document import (
    Coefficient,
    Interval,
    Level,
    MeanWork,
    Model,
    Problem,
    Shape,
    Target,
    Verdict,
)
from .exceptions import BadInputError, LoadError, NoCoefficientsError, NotFoundError, TracefitError
from .loading import Snapshot, load
from .plan import Plan
from .request_times import Estimate, RequestEstimate
from .selection import Identity, distinctions, find_config, minute
from .speed_change import OutlierReplica, SpeedChange, term_text
from .step_model import Limits, Prediction

__all__ = [
    "BadInputError",
    "Coefficient",
    "Config",
    "ConfigDiff",
    "Diff",
    "Estimate",
    "Identity",
    "Interval",
    "Level",
    "Limits",
    "LoadError",
    "MeanWork",
    "Model",
    "Move",
    "NoCoefficientsError",
    "NotFoundError",
    "OutlierReplica",
    "Plan",
    "Prediction",
    "Problem",
    "RequestEstimate",
    "Shape",
    "Snapshot",
    "SpeedChange",
    "Target",
    "TracefitError",
    "TypicalStep",
    "Verdict",
    "distinctions",
    "find_config",
    "load",
    "minute",
    "term_text",
]
