"""What one should hear of a configuration: its steps became slower, or one of its engines is, and in which term."""

from __future__ import annotations

import math
from typing import NamedTuple

from .selection import minute

RECENT_NS = 86_400_000_000_000
"""A change of speed is news for a day: so far back reach the charts of the page, which show it."""


class SpeedChange(NamedTuple):
    """A confirmed change of the speed of steps.

    Attributes:
        factor: new time of a step per old time.
        since_unix_nano: event time at which it began, within ``within_s`` seconds; None: not known.
        term: what moved: ``all`` terms alike, ``decode`` (all but prefill), ``not_prefill`` (decode, or a coefficient
            of it), or a coefficient by its name; empty while the steps since do not tell which.
        added: microseconds more per unit of that coefficient; of the others, the share; None: not known.
    """

    factor: float
    since_unix_nano: int
    term: str = ""
    added: float | None = None
    within_s: float | None = None

    def is_recent(self, now_unix_nano: int) -> bool:
        """Whether a person who looks now may not have heard of it."""
        return now_unix_nano - self.since_unix_nano < RECENT_NS

    def text(self, now_unix_nano: int) -> str:
        """``steps take 1.42 × as long since 14:03 UTC ± 2 min: …`` and the term; with the date where it is another."""
        since, today = minute(self.since_unix_nano), minute(now_unix_nano).partition(" ")[0]
        change = f"steps {'with prefill ' * self.term.startswith('prefill')}take {self.factor:.2f} × as long"
        said = term_text(self.term, self.added) or _UNSURE
        return f"{change} since {since.removeprefix(f'{today} ')}{self.within}: {said}"

    @property
    def within(self) -> str:
        """`` ± 2 min``: whole minutes, as the time has; empty where that is not known."""
        return "" if self.within_s is None else f" ± {max(math.ceil(self.within_s / 60.0), 1)} min"


_TERMS = {
    "all": "every term alike",
    "decode": "decode, not prefill",
    "not_prefill": "decode or every step, not prefill",
    "intercept": "every step by the same time",
    "prefill_tokens": "prefill, by its tokens",
    "decode_context_tokens": "decode, by its context",
    "requests": "decode, by its requests",
    "active_experts": "reading the experts of a mixture",
}
_UNSURE = "no single term is sure"
_PER_UNIT = {"intercept": "", "requests": " per request", "active_experts": " for all experts"}


def term_text(term: str, added: float | None = None) -> str:
    """A term that moved, in words, and by how much: ``every step by the same time (+30.8 ms)``; empty of none.

    Where all terms moved alike, the factor of the steps says how much.
    """
    words = _TERMS.get(term, term and f"the term {term}")
    if not words or added is None or term == "all":
        return words
    if term in {"decode", "not_prefill"}:
        return f"{words} ({added:+.0%})"
    amount = f"{added / 1e3:+.3g} ms" if abs(added) >= 1e3 else f"{added:+.3g} µs"  # noqa: PLR2004 -- a millisecond
    return f"{words} ({amount}{_PER_UNIT.get(term, ' per token')})"


OUTLIERS_NAMED = 16
"""Engines of another speed that are named; a snapshot has those first that are furthest from the others."""


class OutlierReplica(NamedTuple):
    """An engine of a configuration whose steps take another time than those of its siblings.

    Attributes:
        engine: its name; empty where its state did not say.
        ratio: its time per theirs.
        stderr: standard error of ``ratio``; None: not known.
        term: as of :class:`SpeedChange`, and so is ``added``.
        siblings: how many others there are.
    """

    engine: str
    ratio: float
    stderr: float | None
    term: str
    added: float | None
    siblings: int

    @property
    def text(self) -> str:
        """``engine 'a' takes 1.586 ± 0.008 times as long as the others: …`` with 95 % of the ratio, and the term."""
        error = "" if self.stderr is None else f" ± {1.96 * self.stderr:.3f}"
        others = "the others" if self.siblings > 1 else "the only other one, and of two either may be the odd one"
        said = term_text(self.term, self.added) or _UNSURE
        ratio = f"takes {self.ratio:.3f}{error} times as long as {others}"
        return f"engine {self.engine or 'unknown'!r} {ratio}: {said}"
