"""Recordings as a receiver: what a file holds is told by its content, and several files are merged by event time.

Four kinds of entries: exports as protobuf or as JSON; messages of a KV publisher and scraped pages of counters, one
JSON line each. How they are framed and compressed is in collector/recordings/framing.py, which files are one source in
collector/recordings/sources.py. A damaged file gives what precedes the damage.

The merge key of an export is the newest span end seen so far in its file, that of a KV batch or a page
the newest one's time:
never decreasing, so that the order within a file stays as recorded, and independent of the order of the files on the
command line.
"""

from __future__ import annotations

import heapq
import io
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from collector.decode import json_to_protobuf
from collector.decode.kv import LINE_MARK, KvBatch, read_line
from collector.decode.pages import PageParser, ScrapedPage, is_page_line, read_page_line
from collector.receive import Export, count_spans, newest_end_unix_nano
from collector.runtime import Clock, PrintLine, Progress, StartError
from collector.telemetry import KvSkip, Outcome, ScrapeOutcome

from .framing import DamagedError, NoEntryError, NotReadError, decompressed, entries, is_json, sniff

FILE_TRANSPORT = "file"
_NUMBERS_BYTES = 256
"""What a page or a batch of KV events counts for: it holds numbers only."""
_OTHER_SIGNALS = (b'{"resourceMetrics"', b'{"resourceLogs"')

Warn = Callable[[str], None]


class TimedExport(NamedTuple):
    """An export and its place in event time."""

    unix_nano: int
    export: Export

    @property
    def label(self) -> str:
        """The file it comes from."""
        return self.export.peer


class TimedKv(NamedTuple):
    """A batch of KV events and its place in event time."""

    unix_nano: int
    batch: KvBatch

    @property
    def label(self) -> str:
        """The file it comes from."""
        return self.batch.source


class TimedPage(NamedTuple):
    """A page of counters and its place in event time."""

    unix_nano: int
    page: ScrapedPage

    @property
    def label(self) -> str:
        """The file it comes from."""
        return self.page.recording


Timed = TimedExport | TimedKv | TimedPage


class Recording:
    """One file; iterate once. ``position_bytes`` of ``size_bytes`` have been read so far.

    Args:
        path: the file, or what to call ``stream`` in messages.
        warn: told what could not be read.
        source: what it is a recording of: one name for all files of a rotation, else its path.
        stream: read instead of the file.
        size_bytes: of the stream, 0 where nobody knows.
    """

    def __init__(
        self, path: Path | str, warn: Warn, source: str = "", stream: BinaryIO | None = None, size_bytes: int = 0
    ) -> None:
        try:
            file = Path(path)
            self._raw: BinaryIO = stream or file.open("rb")
            self.size_bytes = size_bytes if stream else file.stat().st_size
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
        self.path = file
        self.name = str(path)
        self.label = source or self.name
        self.undecodable = 0
        self._entries = 0
        self._other_signals = 0
        self._bad_pages: Counter[str] = Counter()
        self._said = False
        self._warn = warn

    @property
    def position_bytes(self) -> int:
        """How far the file has been read."""
        return self.size_bytes if self._raw.closed or not self.size_bytes else min(self._raw.tell(), self.size_bytes)

    def __iter__(self) -> Generator[Timed, None, None]:
        newest_unix_nano = 0
        for payload in self._payloads():
            if isinstance(payload, KvBatch):
                self._entries += 1
                newest_unix_nano = max(newest_unix_nano, payload.ts_unix_ns)
                yield TimedKv(newest_unix_nano, payload)
                continue
            if isinstance(payload, ScrapedPage):
                self._entries += 1
                newest_unix_nano = max(newest_unix_nano, payload.unix_ns)
                yield TimedPage(newest_unix_nano, payload)
                continue
            spans = count_spans(payload)
            if isinstance(spans, Outcome):
                self.undecodable += 1
                continue
            self._entries += 1
            newest_unix_nano = max(newest_unix_nano, newest_end_unix_nano(payload))
            yield TimedExport(newest_unix_nano, Export(payload, self.label, FILE_TRANSPORT, spans, self.label))
        for why, pages in self._bad_pages.items():
            self._say(f"{pages} pages cannot be learned from ({why})")
        if self._other_signals:
            self._warn(f"{self.name}: {self._other_signals} entries are metrics or logs, which are not read")
        if self.undecodable and self._entries:
            self._warn(f"{self.name}: {self.undecodable} entries are no OTLP traces")
        elif not (self._entries or self._other_signals or self._said):
            self._warn(f"{self.name}: neither length-delimited OTLP traces nor lines of OTLP/JSON, KV events or pages")

    def exports(self) -> Iterator[TimedExport]:
        """The exports of a recording without their times."""
        return (timed for timed in self if isinstance(timed, TimedExport))

    def _payloads(self) -> Iterator[bytes | KvBatch | ScrapedPage]:
        try:
            with self._raw:
                head, stream = sniff(decompressed(self._raw))
                yield from self._lines(stream) if is_json(head) else self._exports(head, stream)
        except NotReadError as error:
            self._say(str(error))
        except (DamagedError, EOFError, zlib.error, OSError) as error:
            if isinstance(error, NoEntryError) and not self._entries:
                return  # no recording at all, which is said once
            self._say(f"damaged after {self.position_bytes} bytes ({error})")

    def _say(self, text: str) -> None:
        self._said = True
        self._warn(f"{self.name}: {text}")

    def _lines(self, stream: io.BufferedReader) -> Iterator[bytes | KvBatch | ScrapedPage]:
        parser = PageParser()
        for line in stream:
            if line.isspace():
                continue
            if line.strip() == b"{":
                raise NotReadError("JSON over several lines is not read, only one object a line (jq -c .)")
            if is_page_line(line):
                page = read_page_line(line, parser, self.label)
                if isinstance(page, ScrapeOutcome):
                    self._bad_pages[parser.explain(page)] += 1
                else:
                    yield page
                continue
            if LINE_MARK in line:
                batch = read_line(line, self.label)
                if isinstance(batch, KvSkip):
                    self.undecodable += 1
                else:
                    yield batch
                continue
            if line.startswith(_OTHER_SIGNALS):
                self._other_signals += 1
                continue
            yield from self._converted(line)

    def _exports(self, head: bytes, stream: io.BufferedReader) -> Iterator[bytes]:
        for entry in entries(head, stream):
            if entry.startswith(b"{"):
                yield from self._converted(entry)
            else:
                yield entry

    def _converted(self, text: bytes) -> Iterator[bytes]:
        try:
            yield json_to_protobuf(text)
        except ValueError:
            self.undecodable += 1


def in_batches(timed: Iterable[Timed], bytes_max: int) -> Iterator[list[Timed]]:
    """What belongs to one turn of the pipeline: as much as fits, one item at least."""
    batch: list[Timed] = []
    size_bytes = 0
    for item in timed:
        item_bytes = len(item.export.payload) if isinstance(item, TimedExport) else _NUMBERS_BYTES
        if batch and size_bytes + item_bytes > bytes_max:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += item_bytes
    if batch:
        yield batch


def merged(recordings: Iterable[Recording]) -> Iterator[Timed]:
    """Everything in event-time order; ties go by source and path, so the order of the arguments never matters."""
    ordered = sorted(recordings, key=lambda recording: (recording.label, recording.name))
    return heapq.merge(*ordered, key=lambda timed: (timed.unix_nano, timed.label))


def merged_with_progress(recordings: Sequence[Recording], clock: Clock, note: PrintLine) -> Iterator[Timed]:
    """The same, and how far that is on the way."""
    total_bytes = sum(recording.size_bytes for recording in recordings)
    spans = exports = kv_batches = pages = 0
    with Progress("read", total_bytes, clock, note) as progress:
        for timed in merged(recordings):
            yield timed
            if isinstance(timed, TimedKv):
                kv_batches += 1
            elif isinstance(timed, TimedPage):
                pages += 1
            else:
                exports += 1
                spans += timed.export.spans
            if progress.is_due:
                progress.advance_to(
                    sum(recording.position_bytes for recording in recordings), f"{exports:,} exports, {spans:,} spans"
                )
    kv_text = f" and {kv_batches} batches of KV events" if kv_batches else ""
    kv_text += f" and {pages} pages" if pages else ""
    note(f"read {exports} exports, {spans} spans{kv_text} in {progress.elapsed_s:.1f} s")
