"""Decode, dedupe, join: admitted exports become events for whoever learns.

The same for live telemetry, for replays and for the evaluation bench. Where rows are cut depends on the telemetry, not
on how many exports are decoded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from collector.config import DedupeConfig, JoinConfig
from collector.decode import PIECE_BYTES, Decoder, Telemetry, latest_unix_ns, pieces
from collector.decode.pages import ScrapedPage
from collector.identity import Knowledge
from collector.join import Event, Joiner, SpanWindow, together
from collector.receive import Export, count_spans
from collector.telemetry import Counts, Outcome, Skip, table

Observer = Callable[[Telemetry], None]
"""Sees what was decoded, before it is joined."""


class TelemetryReader:
    """Exports to what their resources said, each span once."""

    def __init__(self, dedupe: DedupeConfig) -> None:
        self.span_window = SpanWindow(int(dedupe.window_s * 1e9), dedupe.ids_max, dedupe.emitters_max)
        self._decoder = Decoder()
        self._knows_now = False

    @property
    def foreign_scopes(self) -> tuple[str, ...]:
        """Whose spans are left out; from any thread."""
        return self._decoder.foreign_scopes

    def read(self, exports: Sequence[Export], counts: Counts) -> Iterator[list[tuple[str, Telemetry]]]:
        """Recording and telemetry, a bounded number of bytes at a time; what cannot be used is counted."""
        for batch in _batches(exports):
            yield list(self._decoded(batch, counts))

    def _decoded(self, exports: Sequence[Export], counts: Counts) -> Iterator[tuple[str, Telemetry]]:
        payloads, arrived = [(e.payload, e.peer) for e in exports], [e.arrived_unix_ns for e in exports]
        if not self._knows_now and any(arrived):
            self.span_window.forget_ahead(latest_unix_ns(max(arrived)))
            self._knows_now = True
        decoded = self._decoder.decode(payloads, self.span_window.admit, counts, arrived)
        for export, resources in zip(exports, decoded, strict=True):
            if resources is None:  # admission has parsed the envelope only
                spans = _spans_of(export)
                counts[table.DECODED_SPANS] += spans
                counts[table.SKIPPED_SPANS, Skip.INCONSISTENT] += spans
                continue
            export.foreign.add_to(counts)
            for telemetry in resources:
                yield export.recording, telemetry


class Correlator:
    """Owns what is held between the bytes and the rows."""

    def __init__(self, join: JoinConfig, dedupe: DedupeConfig, knowledge: Knowledge | None = None) -> None:
        self.joiner = Joiner(join, knowledge)
        self._reader = TelemetryReader(dedupe)

    @property
    def span_window(self) -> SpanWindow:
        """Span ids seen lately."""
        return self._reader.span_window

    def process(self, exports: Sequence[Export], counts: Counts, observe: Observer) -> Iterator[Event]:
        """Decode and join, a bounded number of bytes at a time; what cannot be used is counted."""
        for batch in self._reader.read(exports, counts):
            for recording, telemetry in together(batch, self.joiner.goes_on):
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


def _batches(exports: Sequence[Export]) -> Iterator[Sequence[Export]]:
    """What is decoded at once: small exports together, of a large one a piece at a time, because it takes memory."""
    together: list[Export] = []
    for export in exports:
        if len(export.payload) <= PIECE_BYTES:
            together.append(export)
            continue
        if together:
            yield together
            together = []
        for piece in pieces(export.payload):
            yield [export if piece is export.payload else export._replace(payload=piece, spans=0)]
    if together:
        yield together


def _spans_of(export: Export) -> int:
    """Spans of an export that nobody could read, or of a piece of one."""
    if export.foreign.spans:
        return export.spans
    spans = count_spans(export.payload)
    return export.spans if isinstance(spans, Outcome) else spans
