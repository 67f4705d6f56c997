"""Decode, dedupe, join: admitted exports become events for whoever learns.

The same for live telemetry, for replays and for the evaluation bench. Where rows are cut depends on the telemetry, not
on how many exports are decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from collector.config import Config
from collector.decode import Decoder, Telemetry
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.ingest import Export
from collector.join import Event, Joiner, SpanWindow
from collector.telemetry import Counts, Skip, table

SPANS_REMEMBERED_NS = 600_000_000_000
"""Of event time: an export that is sent again within it changes nothing. Retries of SDKs end after a minute."""
SPANS_MAX = 100_000
"""Span ids remembered of one sender; a step every 10 ms gives 60,000 in that time."""
SENDERS_RATIO = 4
"""Senders whose span ids are remembered, to each engine: itself, its API processes, and who takes its place."""

Observer = Callable[[Telemetry], None]
"""Sees what was decoded, before it is joined."""


class TelemetryReader:
    """Exports to what their resources said, each span once."""

    def __init__(self, engines_max: int) -> None:
        self.span_window = SpanWindow(SPANS_REMEMBERED_NS, SPANS_MAX, SENDERS_RATIO * engines_max)
        self._decoder = Decoder()

    @property
    def foreign_scopes(self) -> tuple[str, ...]:
        """Whose spans are left out; from any thread."""
        return self._decoder.foreign_scopes

    def read(self, exports: Sequence[Export], counts: Counts) -> Iterator[tuple[str, Telemetry]]:
        """Recording and telemetry; what cannot be used is counted."""
        payloads, arrived = [(e.payload, e.peer) for e in exports], [e.arrived_unix_ns for e in exports]
        decoded = self._decoder.decode(payloads, self.span_window.admit, counts, arrived)
        for export, resources in zip(exports, decoded, strict=True):
            if resources is None:  # admission has parsed the envelope only
                counts[table.DECODED_SPANS] += export.spans
                counts[table.SKIPPED_SPANS, Skip.INCONSISTENT] += export.spans
                continue
            for telemetry in resources:
                yield export.recording, telemetry


class Correlator:
    """Owns what is held between the bytes and the rows."""

    def __init__(self, config: Config, knowledge: Knowledge | None = None) -> None:
        self.joiner = Joiner(config, knowledge)
        self._reader = TelemetryReader(config.engines_max)

    @property
    def span_window(self) -> SpanWindow:
        """Span ids seen lately."""
        return self._reader.span_window

    def process(self, exports: Sequence[Export], counts: Counts, observe: Observer) -> Iterator[Event]:
        """Decode and join; what cannot be used is counted."""
        for recording, telemetry in self._reader.read(exports, counts):
            observe(telemetry)
            self.joiner.add(telemetry, recording)
        yield from self.joiner.drain()

    @property
    def foreign_scopes(self) -> tuple[str, ...]:
        """Whose spans are left out; from any thread."""
        return self._reader.foreign_scopes

    def process_pages(self, pages: Sequence[ScrapedPage]) -> Iterator[Event]:
        """Join what servers counted."""
        for page in pages:
            self.joiner.add_page(page)
        if pages:
            yield from self.joiner.drain()
