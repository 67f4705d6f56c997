"""The templates that were read off the stream so far, and how the events of a chunk find theirs.

Events are looked at by their size: for most sizes one template is known, and fits all. What fits none is walked, as far
as there is time for it, and is a template from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from .template import (
    COLUMNS,
    U64,
    EventLayout,
    Events,
    Index,
    Matched,
    Template,
    learnable,
    read_values,
    shape,
)

TEMPLATES_MAX: Final = 128
"""Some kB each; beyond, all are forgotten: those in use come back at once."""
WALKS_MAX: Final = 64
LAYOUTS_MAX: Final = 3
"""Events walked per chunk; new layouts: who sends ever new ones pays the price of the plain decoder, hardly more."""


class KnownTemplates:
    """Remembers templates; what it returns does not depend on them, but for events that it leaves to others."""

    def __init__(self) -> None:
        self._of_size: dict[int, list[Template]] = {}
        self._layouts: set[EventLayout] = set()
        self._walks_left = self._layouts_left = 0

    def __len__(self) -> int:
        """How many are known."""
        return sum(map(len, self._of_size.values()))

    def match(self, chunk: list[bytes]) -> Matched:
        """The events that a template reads; numpy's cost per call spreads over some hundred of them."""
        if len(self) >= TEMPLATES_MAX:
            self._of_size.clear()
            self._layouts.clear()
        self._walks_left, self._layouts_left = WALKS_MAX, LAYOUTS_MAX
        events = Events(chunk)
        values = np.empty((len(chunk), COLUMNS), np.uint64)
        by_size = np.argsort(events.sizes, kind="stable")
        sizes = events.sizes[by_size]
        fitting: list[tuple[Template, Index]] = []
        for some in np.split(by_size, np.flatnonzero(sizes[1:] != sizes[:-1]) + 1):
            fitting += self._match_size(chunk, events, some, values)
        fits = np.zeros(len(chunk), np.bool_)
        for _, some in fitting:
            fits[some] = True
        if fitting:
            fits &= read_values(values, fitting)
        rows = values.view(np.int64)
        return Matched(np.flatnonzero(fits), rows if fits.all() else rows[fits])

    def _match_size(
        self, chunk: list[bytes], events: Events, todo: Index, values: U64
    ) -> Iterator[tuple[Template, Index]]:
        """Events of one size by template; their values go to their rows."""
        for template in self._of_size.get(len(chunk[todo[0]]), ()):
            fits = template.fits(events, todo, values)
            yield template, todo[fits]
            todo = todo[~fits]
            if not len(todo):
                return
        todo = todo[events.are_summaries[todo]]
        while len(todo) and self._walks_left:
            learned = self._learn(chunk[todo[0]])
            if learned is None:  # what one sender says stands together: another's is met soon
                todo = todo[len(todo) // 2 + 1 :]
                continue
            fits = learned.fits(events, todo, values)
            yield learned, todo[fits]
            todo = todo[~fits]

    def _learn(self, event: bytes) -> Template | None:
        """A template of an event, known from now on."""
        self._walks_left -= 1
        found = shape(event)
        if found is None:
            return None
        if found.layout not in self._layouts:
            if not self._layouts_left or not learnable(found.layout):
                return None
            self._layouts_left -= 1
            self._layouts.add(found.layout)
        template = Template(event, found)
        self._of_size.setdefault(len(event), []).append(template)
        return template
