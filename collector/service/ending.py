"""The end of the worker: what time a last state and generation take, and which spans would be lost without them.

How long they take is known from those before: the longest of each, times ``MARGIN``, because the last generation is
made from a flushed copy. That much of the time to drain is kept for them, up to half of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from collector.ingest import Export
from collector.runtime import Clock

MARGIN: Final = 2.0
RESERVED_SHARE: Final = 0.5


class Ending:
    """Kept up to date by the worker's thread; read by who stops it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._longest_s: dict[str, float] = {}
        self._spans_in_hand = 0
        self._spans_unsaved = 0

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Remember how long one of the last things took this time, if it was the longest."""
        begun_ns = self._clock.monotonic_ns()
        yield  # what is timed raises nothing
        elapsed_s = (self._clock.monotonic_ns() - begun_ns) / 1e9
        self._longest_s[what] = max(self._longest_s.get(what, 0.0), elapsed_s)

    @contextlib.contextmanager
    def in_hand(self, exports: Sequence[Export]) -> Iterator[None]:
        """The batch is being learned from; afterwards it is in no state yet."""
        spans = sum(export.spans for export in exports)
        self._spans_in_hand = spans
        try:
            yield
            self._spans_unsaved += spans
        finally:  # what fails is counted elsewhere
            self._spans_in_hand = 0

    def record_state(self) -> None:
        """A state was taken: it contains everything learned so far."""
        self._spans_unsaved = 0

    def reserved_s(self, drain_s: float) -> float:
        """How much of the time to drain the last state and generation need."""
        return min(MARGIN * sum(tuple(self._longest_s.values())), RESERVED_SHARE * drain_s)

    def missing(self, queued: Sequence[Export], *, ended: bool) -> str:
        """What a stop now leaves out, in words: only what really is."""
        spans = sum(export.spans for export in queued) + self._spans_in_hand
        counted = [(spans, "spans not learned from")]
        if not ended:
            counted.append((self._spans_unsaved, "spans learned from and in no state"))
        texts = [f"{number} {text}" for number, text in counted if number]
        return ", ".join(texts if ended else [*texts, "no last generation"])
