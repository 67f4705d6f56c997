"""What an engine is asked lately: the load at which advice is given, and what requests saw at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Mix(NamedTuple):
    """The requests of the last minutes, in the mean, per engine.

    Attributes:
        prompt_tokens, output_tokens: of a finished request.
        prefix_hit: share of prompt tokens that were never computed; 0 where that is not known.
        concurrency: requests in flight, as a decoding request meets them, itself included.
        itl_us: between the tokens of a request, by tokens; None where nothing was observed.
        ttft_us: from queued in the engine to the first token; None where nothing was observed.
    """

    prompt_tokens: float
    output_tokens: float
    prefix_hit: float
    concurrency: float
    itl_us: float | None
    ttft_us: float | None


MixOf = Callable[[str], Mix | None]
"""Of a configuration by its id; None where nothing was finished lately."""
