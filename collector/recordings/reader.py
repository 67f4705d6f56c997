"""Recordings as a receiver: what a file holds is told by its content, and several files are merged by event time.

Four kinds, each also gzipped: exports as protobuf, each preceded by its length as a varint; exports as JSON, one line
each (the OpenTelemetry Collector's file exporter); messages of a KV publisher, one JSON line each; scraped
pages of counters, one JSON line each. A damaged file gives
what precedes the damage. Every file is a source of its own, named by its path.

The merge key of an export is the newest span end seen so far in its file, that of a KV batch or a page
the newest one's time:
never decreasing, so that the order within a file stays as recorded, and independent of the order of the files on the
command line.
"""

from __future__ import annotations

import gzip
import heapq
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from collector.decode import json_to_protobuf
from collector.decode.kv import LINE_MARK, KvBatch, read_line
from collector.decode.pages import PageParser, ScrapedPage, is_page_line, read_page_line
from collector.receive import Export, count_spans, newest_end_unix_nano
from collector.runtime import StartError
from collector.telemetry import KvSkip, Outcome, ScrapeOutcome

TRANSPORT = "file"
GZIP_MAGIC = b"\x1f\x8b"
EXPORT_BYTES_MAX = 1 << 30
_SNIFF_BYTES = 64
_VARINT_BYTES_MAX = 5

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
    """One file; iterate once. ``position_bytes`` of ``size_bytes`` have been read so far."""

    def __init__(self, path: Path, warn: Warn) -> None:
        try:
            self._raw: BinaryIO = path.open("rb")
            self.size_bytes = path.stat().st_size
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
        self.label = str(path)
        self.undecodable = 0
        self._warn = warn

    @property
    def position_bytes(self) -> int:
        """How far the file has been read."""
        return self.size_bytes if self._raw.closed else min(self._raw.tell(), self.size_bytes)

    def __iter__(self) -> Iterator[Timed]:
        newest_unix_nano = entries = 0
        for payload in self._payloads():
            if isinstance(payload, KvBatch):
                entries += 1
                newest_unix_nano = max(newest_unix_nano, payload.ts_unix_ns)
                yield TimedKv(newest_unix_nano, payload)
                continue
            if isinstance(payload, ScrapedPage):
                entries += 1
                newest_unix_nano = max(newest_unix_nano, payload.unix_ns)
                yield TimedPage(newest_unix_nano, payload)
                continue
            spans = count_spans(payload)
            if isinstance(spans, Outcome):
                self.undecodable += 1
                continue
            entries += 1
            newest_unix_nano = max(newest_unix_nano, newest_end_unix_nano(payload))
            yield TimedExport(newest_unix_nano, Export(payload, self.label, TRANSPORT, spans, self.label))
        if not entries:
            self._warn(f"{self.label}: neither length-delimited OTLP traces nor lines of OTLP/JSON, KV events or pages")
        elif self.undecodable:
            self._warn(f"{self.label}: {self.undecodable} entries are no OTLP traces")

    def exports(self) -> Iterator[TimedExport]:
        """The exports of a recording without their times."""
        return (timed for timed in self if isinstance(timed, TimedExport))

    def _payloads(self) -> Iterator[bytes | KvBatch | ScrapedPage]:
        try:
            with self._raw:
                magic = self._raw.read(len(GZIP_MAGIC))
                self._raw.seek(0)
                opened = gzip.GzipFile(fileobj=self._raw) if magic == GZIP_MAGIC else self._raw
                stream = io.BufferedReader(cast("Any", opened))
                yield from self._lines(stream) if _is_json(stream) else self._delimited(stream)
        except (EOFError, zlib.error, OSError) as error:
            self._warn(f"{self.label}: damaged after {self.position_bytes} bytes ({error})")

    def _lines(self, stream: io.BufferedReader) -> Iterator[bytes | KvBatch | ScrapedPage]:
        parser = PageParser()
        for line in stream:
            if line.isspace():
                continue
            if is_page_line(line):
                page = read_page_line(line, parser, self.label)
                if isinstance(page, ScrapeOutcome):
                    self.undecodable += 1
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
            try:
                yield json_to_protobuf(line)
            except ValueError:
                self.undecodable += 1

    def _delimited(self, stream: io.BufferedReader) -> Iterator[bytes]:
        while True:
            length = _read_length(stream)
            if length is None:
                return
            payload = stream.read(length)
            if len(payload) < length:
                raise EOFError("the last export is cut short")
            yield payload


def merged(recordings: Iterable[Recording]) -> Iterator[Timed]:
    """Everything in event-time order; ties go by label, so the order of the arguments never matters."""
    ordered = sorted(recordings, key=lambda recording: recording.label)
    return heapq.merge(*ordered, key=lambda timed: (timed.unix_nano, timed.label))


def _is_json(stream: io.BufferedReader) -> bool:
    """A brace and then a key; the first export of the other kind, 123 bytes long, never looks like that."""
    head = stream.peek(_SNIFF_BYTES)[:_SNIFF_BYTES].lstrip()
    return head.startswith(b"{") and head[1:].lstrip()[:1] in {b'"', b"}"}


def _read_length(stream: io.BufferedReader) -> int | None:
    length = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = stream.read(1)
        if not byte:
            if index:
                raise EOFError("a length is cut short")
            return None
        length |= (byte[0] & 0x7F) << (7 * index)
        if byte[0] < 0x80:  # noqa: PLR2004 -- the continuation bit
            if length > EXPORT_BYTES_MAX:
                break
            return length
    raise EOFError("no length where an export should begin")
