"""Which two scrapes make a row: windows end at clean scrapes and hold enough steps.

A prompt is credited whole at its last chunk, so a window that ends within a prefill has computed what the next one is
credited with. Such a scrape ends no window; after six in a row one is cut anyway. A window with too few steps goes on
too. Scrapes far apart are all taken: there a longer window costs more than a prompt in the wrong one. Nothing is
learned across a restart, or of a window in which a request was preempted: it computes its tokens again.

A counter that fell and soon stands above where it fell from is no restart: several servers answer at one address in
turn. Nothing is learned from such pages, nor from the next 64 that follow.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from collector.decode.pages import EngineReading, Flavour, Meaning
from collector.telemetry import RowDrop
from online.state import saved

from .page_rows import STEPS_MIN, PageRow, WindowSums, row_of, went_back, window_sums
from .scrape_state import Occupancy, Scrape

UNCLEAN_MAX = 6
_COPIES_WINDOWS = 20
_COPIES_KEPT = 64
_COPIES_DOUBTFUL = 1.5
_TURNS_SCRAPES = 64
_BACK_WITHIN_SCRAPES = 8


@dataclass(slots=True)
class ScrapeWindows:
    """Scrapes of one engine in order of time, and the rows between them."""

    STATE = saved(
        "scrape_windows",
        occupancy=Occupancy,
        start=Scrape | None,
        newest=Scrape | None,
        scrapes=int,
        copies=int,
        turns_left=int,
        _before_fall=Scrape | None,
        _since_fall=int,
        _ratios=list[float],
        fresh=lambda _: ScrapeWindows(),
    )

    occupancy: Occupancy = field(default_factory=Occupancy)
    start: Scrape | None = None
    newest: Scrape | None = None
    scrapes: int = 0
    """Since the start of the open window."""
    copies: int = 1
    """Front ends that each count a step in which a request of theirs took part."""
    turns_left: int = 0
    """Scrapes during which several servers are taken to answer in turn."""
    drops: Counter[RowDrop] = field(default_factory=Counter)
    _before_fall: Scrape | None = None
    _since_fall: int = 0
    _ratios: list[float] = field(default_factory=list)

    def restored(self) -> None:
        """Begin anew after a version whose pages had fewer meanings."""
        if any(scrape is not None and len(scrape.values) != len(Meaning) for scrape in (self.start, self.newest)):
            self._begin_anew()

    def add(self, unix_ns: int, mono_ns: int, reading: EngineReading) -> PageRow | None:
        """Take the next scrape; the row that it ends, if it ends one."""
        newest = self.newest
        if newest is not None and mono_ns <= newest.mono_ns:
            if unix_ns <= newest.unix_ns:
                self.drops[RowDrop.TIME_ORDER] += 1
                return None
            self.start = newest = None  # another host's clock: this one was restarted elsewhere
            self.scrapes = 0
        if newest is not None:
            unix_ns = max(unix_ns, newest.unix_ns)  # the wall clock was set back: rows stay in order
        scrape = self.occupancy.scrape(reading.flavour, unix_ns, mono_ns, reading.values, reading.facts)
        self._watch_turns(scrape)
        if newest is not None and went_back(newest, scrape):
            self.drops[RowDrop.RESTART] += 1
            self._before_fall, self._since_fall = newest, 0
            self._begin_anew()
            scrape = self.occupancy.scrape(reading.flavour, unix_ns, mono_ns, reading.values, reading.facts)
        self.newest = scrape
        if self.turns_left:
            self.turns_left -= 1
            self.drops[RowDrop.WHICH_SERVER] += 1
            self.start = None
            return None
        if self.start is None:
            self.scrapes += 1
            if scrape.clean or self.scrapes > UNCLEAN_MAX:
                self._open(scrape)
            return None
        self.scrapes += 1
        window = window_sums(reading.flavour, self.start, scrape, self.scrapes, self.copies)
        wait = self.scrapes <= UNCLEAN_MAX and window.close
        if wait and not (scrape.clean and (window.steps >= STEPS_MIN or window.steps == 0)):
            return None
        return self._close(window, reading.flavour)

    def take_front_ends_of(self, other: ScrapeWindows) -> None:
        """Begin with what another one found out of how many count each step."""
        self.copies, self._ratios = other.copies, list(other._ratios)

    def _watch_turns(self, scrape: Scrape) -> None:
        """Whether counters that fell are back where they fell from, as those of a server that just started are not."""
        before = self._before_fall
        if before is None:
            return
        self._since_fall += 1
        if not went_back(before, scrape):
            self.turns_left = _TURNS_SCRAPES
        if self.turns_left or self._since_fall >= _BACK_WITHIN_SCRAPES:
            self._before_fall = None

    def _open(self, scrape: Scrape) -> None:
        self.start, self.scrapes = scrape, 0

    def _begin_anew(self) -> None:
        self.occupancy, self.start, self.newest, self.scrapes = Occupancy(), None, None, 0

    def _close(self, window: WindowSums, flavour: Flavour) -> PageRow | None:
        start, end = window.start, window.end
        self._open(end)
        if window.steps == 0:
            return None
        if end.value(Meaning.PREEMPTIONS) > start.value(Meaning.PREEMPTIONS):
            self.drops[RowDrop.PREEMPTION] += 1
            return None
        if flavour is Flavour.VLLM and self._count_copies(window):
            self.drops[RowDrop.INCOMPLETE] += 1
            return None
        row = row_of(window)
        if isinstance(row, RowDrop):
            self.drops[row] += 1
            return None
        return row

    def _count_copies(self, window: WindowSums) -> bool:
        """Whether more front ends may have counted the window's steps than are known of by now.

        Decoding requests per counted step fall below those held where several count the same step. Of scrapes far apart
        those held at both ends say too little of the time between to drop the row.
        """
        held = (window.start.decoding + window.end.decoding) / 2.0
        if held < 1.0 or not window.decoded or math.isnan(window.counted):
            return False
        self._ratios.append(held * window.counted / window.decoded)
        several = median(self._ratios)
        if len(self._ratios) < _COPIES_WINDOWS:
            return window.close and several > _COPIES_DOUBTFUL
        self.copies = max(1, round(several))
        del self._ratios[:-_COPIES_KEPT]
        return False
