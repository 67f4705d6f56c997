"""Engines that tell every forward pass by itself (ForwardPassMetrics): a record is a row.

    x = what the pass computed        y = wall_time        l = 1

Nothing has to be rebuilt or waited for, and a record that is lost costs its own row only. The engine's count of its
records shows what is missing. Where it goes back by more than a few, the engine has started again.

A record tells the tokens of all its prompts, not of each. Of n prompts with t tokens in all and c before them,

    prefill_attention = t (c + t / 2) / n

is exact for one prompt, and for several of equal size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from collector.config import Config
from collector.decode.fpm import ForwardPass
from collector.telemetry import JoinEvent
from online import Floats, Quality, RowBlock, Target

from .emitter import Emitter, TargetRows
from .rows import WarmUp, raw_features

_REPEATED = 64
"""A count that is lower by less is of a record that came twice; by more, of an engine that has started again."""


class PassEngine(Emitter):
    """An engine known by its forward passes; :class:`~collector.join.engine.Engine` is one known by its steps."""

    quality = Quality.FPM

    def __init__(self, instance: str, recording: str, number: int, settings: Config) -> None:
        super().__init__(instance, recording, number, settings)
        self.times_steps = False
        self.is_never_late = not recording  # records of a file bear the time at which they were observed
        self._last = -1
        self._passed_unix_ns = 0
        self._passes: defaultdict[Target, list[ForwardPass]] = defaultdict(list)
        self._warm_ups: defaultdict[Target, WarmUp] = defaultdict(lambda: WarmUp(settings.warm_up_rows))

    @property
    def last_step(self) -> int:
        """The newest number that the engine gave a record."""
        return max(self._last, 0)

    def add(self, passes: Iterable[ForwardPass]) -> None:
        """Add records in their order; a heartbeat says only that the engine is there."""
        for passed in passes:
            behind = self._last - passed.counter
            if self._last >= 0 and behind != -1:
                if 0 <= behind < _REPEATED:
                    self.count(JoinEvent.DUPLICATE)
                    continue
                if behind < 0:
                    self.count(JoinEvent.MISSING, -behind - 1)
                else:
                    self.count(JoinEvent.ENGINE_RESTART)
                    self._warm_ups.clear()
            self._last = passed.counter
            if not passed.is_empty:
                self._passes[passed.target].append(passed)
                self.times_steps |= passed.target is Target.STEP_TIME
                self._passed_unix_ns = max(self._passed_unix_ns, passed.unix_ns)
        self.newest_unix_ns = max(self.newest_unix_ns, passed.unix_ns)

    def advance(self) -> list[TargetRows]:
        """Rows since the last call; those of a young process are held until its pace is known."""
        out = []
        # heartbeats say that the engine is idle
        idle = self.newest_unix_ns - self._passed_unix_ns >= self._settings.idle_timeout_s * 1e9
        passes, self._passes = self._passes, defaultdict(list)
        for target in passes.keys() | self._warm_ups.keys():
            blocks = [pass_block(passes[target], self.number)] if target in passes else []
            rows = self._warm_ups[target].pass_through(blocks, self.counts, flush=idle or self.liveness > 0)
            if len(rows):
                out.append((target, rows))
        return out


def pass_block(passes: list[ForwardPass], engine: int) -> RowBlock:
    """A row for each of some passes."""

    def column(name: str) -> Floats:
        return np.array([*map(attrgetter(name), passes)], np.float64)

    prompts, tokens, decodes = column("prefill_requests"), column("prefill_tokens"), column("decode_requests")
    raw = raw_features(
        {
            "prefill_requests": prompts,
            "prefill_tokens": tokens,
            "prefill_attention": tokens * (column("prefill_context_tokens") + tokens / 2.0) / np.maximum(prompts, 1.0),
            "decode_requests": decodes,
            "decode_tokens": decodes,
            "decode_context_tokens": column("decode_context_tokens"),
            "requests": prompts + decodes,
            "running": prompts + decodes,
            "waiting": column("waiting"),
        }
    )
    end_ns = np.array([passed.unix_ns for passed in passes], np.int64)
    return RowBlock.of_lines(raw, column("wall_us"), end_ns=end_ns, engine=engine, quality=Quality.FPM)
