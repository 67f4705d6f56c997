"""What the counters of one scrape say of the moment: who decodes, who is still in prefill, how much context is held.

    F: requests that got a first token    E: that ended    run: gauge    G, P: tokens generated, prompt tokens

    left_k    = max(left_{k-1}, F - E - run, 0)        requests that were aborted: they never reach E
    decoding  = F - E - left
    prefill   = run - decoding                         in the engine, their prompt not yet computed
    context   = P + G - P_ended - G_ended - ghost      exact to within a step

A request that was aborted leaves its tokens in the sum (``ghost``). How many is known whenever the engine is idle, for
then the context is 0; between an abort and the next idle moment the gauge of the KV cache stands in:

    context   = usage blocks block_size - run block_size / 2

On a real recording the gauge is 1.05 times the exact context (90 %: 0.98-1.16; shared blocks are counted once).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from collector.decode.pages import Flavour, Meaning
from online.state import saved

NAN = math.nan


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape with what follows from it; ``values`` by :class:`~collector.decode.pages.Meaning`."""

    STATE = saved("scrape")

    unix_ns: int
    mono_ns: int
    values: tuple[float, ...]
    left: float
    decoding: float
    prefill: float
    context_tokens: float

    @property
    def clean(self) -> bool:
        """Whether no prompt was half computed: what is credited later was computed later."""
        return self.prefill <= 0.0

    def value(self, meaning: Meaning) -> float:
        """One number; NaN if the page has none."""
        return self.values[meaning]


@dataclass(slots=True)
class Occupancy:
    """What has to be remembered from scrape to scrape: requests and tokens that aborted requests left behind."""

    STATE = saved("occupancy")

    left: float = 0.0
    ghost_left: float = 0.0
    ghost_tokens: float = 0.0

    def scrape(
        self,
        flavour: Flavour,
        unix_ns: int,
        mono_ns: int,
        values: tuple[float, ...],
        facts: dict[str, int | bool],
    ) -> Scrape:
        """Read one scrape, in order of time."""
        running = values[Meaning.RUNNING]
        held = values[Meaning.FIRST_TOKENS] - values[Meaning.FINISHED]
        self.left = max(self.left, held - running, 0.0)
        decoding = max(held - self.left, 0.0)
        if flavour is Flavour.SGLANG:  # prompts are counted when their request ends, aborted ones not at all
            context = values[Meaning.KV_USED_TOKENS]
        else:
            tokens = values[Meaning.PROMPT_TOKENS] + values[Meaning.GENERATED_TOKENS]
            tokens -= values[Meaning.FINISHED_PROMPT_TOKENS] + values[Meaning.FINISHED_GENERATED_TOKENS]
            if running == 0.0 and not math.isnan(tokens):
                self.ghost_left, self.ghost_tokens = self.left, tokens
            exact = self.left == self.ghost_left and not math.isnan(tokens)
            context = max(tokens - self.ghost_tokens, 0.0) if exact else _from_gauge(values, running, facts)
        return Scrape(unix_ns, mono_ns, values, self.left, decoding, running - decoding, context)


def _from_gauge(values: tuple[float, ...], running: float, facts: dict[str, int | bool]) -> float:
    blocks, block_size = facts.get("num_gpu_blocks", 0), facts.get("block_size", 0)
    if not blocks or not block_size:
        return NAN
    return max(values[Meaning.KV_USAGE_RATIO] * blocks * block_size - running * block_size / 2.0, 0.0)
