"""Recordings: files of telemetry, told by their content and never by name, read in order of event time.

    lines               a JSON object each: an export, a message of a KV publisher, or a scraped page of counters
    varint + protobuf   each export preceded by its length as a varint

The whole may be gzipped. A damaged file gives what precedes the damage.

The merge key of an entry is the newest span end, KV batch or page in its file so far: it never decreases, so that the
order within a file stays as recorded, whatever the order of the files on the command line.

A file is a source of its own, because two recordings may be of two machines. Files that a rotation made of one are one:

    traces-2026-11-22T05-02-14.173.json   the Collector's file exporter (``-size`` or the like may follow the time)
    traces.json-20261122  traces.json.1   logrotate
    dynamo-fpm.4192.000001.jsonl.gz       Dynamo's traces of forward passes

each perhaps with ``.gz``, beside ``traces.json``, after which the source is named. So are those that an exporter for
object stores wrote below one folder, each minute into another one; the folder and ``traces`` name them:

    otlp/year=2026/month=11/day=22/hour=05/minute=02/traces_483920175.binpb.gz
    otlp/2026/11/22/traces_05_02_14.json
"""

from __future__ import annotations

import gzip
import heapq
import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import msgspec

from collector.config import refuse_special
from collector.decode import Export, fpm, json_to_protobuf, read_span_ends
from collector.decode.fpm import ForwardPass
from collector.decode.kv import LINE_SIGNATURE, KvBatch, read_line
from collector.decode.pages import PageProblem, ScrapedPage, is_page_line, read_page_line
from collector.runtime import PrintLine, StartError, progress
from collector.telemetry import Outcome, Skip

STDIN: Final = "-"
GZIP: Final = b"\x1f\x8b"
EXPORT_BYTES_MAX: Final = 1 << 30
SNIFF_BYTES: Final = 64
_VARINT_BYTES_MAX, _CONTINUED = 5, 0x80
_NUMBERS_BYTES: Final = 256
"""Bytes that a page or a batch of KV events counts for in a batch: it holds numbers only."""
_ROTATED: Final = re.compile(
    r"(?P<stem>.+?)(?:"
    r"-\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}(?:-[a-z]+)?(?P<suffix>\.[^.]+)?"
    r"|-20\d{6}(?:-?\d{2,10})?"
    r"|\.\d{1,3}"
    r"|\.\d{6}\.jsonl"
    r")(?:\.gz)?"
)
_PARTITIONED: Final = re.compile(
    r"(?P<above>.*?)/?(?:year=)?20\d\d/(?:month=)?\d\d(?:/(?:day=|hour=|minute=)?\d\d){0,3}/(?P<stem>[A-Za-z]*)[^/]*"
)


# --- bytes ------------------------------------------------------------------------------------------------------------


_DAMAGES: Final = (EOFError, zlib.error, gzip.BadGzipFile)
"""Exceptions that reading a damaged file raises."""


def _decompressed(raw: Any) -> io.BufferedReader:
    stream = io.BufferedReader(raw)
    packed = stream.peek(len(GZIP)).startswith(GZIP)
    return io.BufferedReader(cast("Any", gzip.GzipFile(fileobj=stream))) if packed else stream


def _is_json(head: bytes) -> bool:
    """A brace and then a key; the first export of another kind, 123 bytes long, never looks like that."""
    head = head.lstrip()
    return head.startswith(b"{") and head[1:].lstrip()[:1] in {b'"', b"}"}


def _entries(stream: io.BufferedReader) -> Iterator[bytes]:
    """Exports that are preceded by their length; EOFError where one is cut short, or no length begins one."""
    while stream.peek(1):
        length = _read_varint(stream)
        if not 0 < length <= EXPORT_BYTES_MAX:
            raise EOFError("no length where an export should begin")
        entry = stream.read(length)
        if len(entry) < length:
            raise EOFError("the last export is cut short")
        yield entry


def _read_varint(stream: io.BufferedReader) -> int:
    """A varint of protobuf; 0, which is no length, where none begins."""
    length = 0
    for index in range(_VARINT_BYTES_MAX):
        byte = ord(stream.read(1) or b"\0")
        length |= (byte & 0x7F) << (7 * index)
        if byte < _CONTINUED:
            return length
    return 0


# --- entries ----------------------------------------------------------------------------------------------------------


Item = Export | KvBatch | ScrapedPage | ForwardPass
"""Content of one entry of a recording."""
_KINDS: Final[dict[str, type[Item]]] = {
    "exports": Export,
    "kv": KvBatch,
    "pages": ScrapedPage,
    "passes": ForwardPass,
}


_NO_TRACES: Final = "entries are no OTLP traces"
_NO_RECORDING: Final = (
    "neither length-delimited OTLP nor lines of OTLP/JSON, KV events, pages or passes, plain or in gzip"
)


class Timed(NamedTuple):
    """An entry, its place in event time, and the recording it is from.

    A forward pass has no time of day; its place is what passed before it in the same file.
    """

    unix_nano: int
    label: str
    item: Item

    @property
    def size_bytes(self) -> int:
        """Bytes that it counts for in a batch, or in memory."""
        return len(self.item.payload) if isinstance(self.item, Export) else _NUMBERS_BYTES


class Recording:
    """One file; iterate once. ``position_bytes`` of ``size_bytes`` have been read so far.

    Args:
        path: the file, or what to call ``stream`` in messages.
        warn: told what could not be read.
        source: what it is a recording of: one name for all files of a rotation, else its path.
        stream: read instead of the file; nobody knows its size.
    """

    def __init__(self, path: Path | str, warn: PrintLine, source: str = "", stream: BinaryIO | None = None) -> None:
        self.path, self.name = Path(path), str(path)
        self.label = source or self.name
        try:
            if stream is None:
                refuse_special(self.path)
            self._raw: BinaryIO = stream or self.path.open("rb")
            self.size_bytes = 0 if stream else self.path.stat().st_size
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
        self._passed_ns: Counter[str] = Counter()
        self._warn = warn

    @property
    def position_bytes(self) -> int:
        """How far the file has been read."""
        return self.size_bytes if self._raw.closed or not self.size_bytes else min(self._raw.tell(), self.size_bytes)

    def __iter__(self) -> Generator[Timed, None, None]:
        newest_unix_nano = entries = 0
        damage, unread = "", Counter[str]()
        try:
            with self._raw:
                stream = _decompressed(self._raw)
                for read in self._read(stream):
                    timed = read if isinstance(read, str) else self._timed(read, newest_unix_nano)
                    if isinstance(timed, str):
                        unread[timed] += 1
                        continue
                    newest_unix_nano = timed.unix_nano
                    entries += 1
                    yield timed
        except _DAMAGES as error:
            damage = f"damaged after {self.position_bytes} bytes ({error})"
        except OSError as error:  # of the disk, which does not say of what
            error.filename = self.name
            raise
        if not entries:
            del unread[_NO_TRACES]
            damage = "" if unread else _NO_RECORDING
        for text in (*(f"{count} {what}" for what, count in unread.items()), damage):
            if text:
                self._warn(f"{self.name}: {text}")

    def _timed(self, item: bytes | Item, newest_unix_nano: int) -> Timed | str:
        """An entry in its place, which is not before the newest so far, or why it is not read."""
        match item:
            case bytes():
                ends = read_span_ends(item)
                if isinstance(ends, Outcome) or not ends:  # JSON of metrics or logs has no span
                    return _NO_TRACES
                unix_nano = max(ends)
                item = Export(item, self.label, len(ends), self.label)
            case KvBatch():
                unix_nano = item.ts_unix_ns
            case ForwardPass(unix_ns=0):  # it comes when all before it of the same engine have passed
                self._passed_ns[item.instance] += round(1e3 * item.wall_us)
                unix_nano = self._passed_ns[item.instance]
                item = msgspec.structs.replace(item, unix_ns=unix_nano)
            case ForwardPass() | ScrapedPage():
                unix_nano = item.unix_ns
        return Timed(max(newest_unix_nano, unix_nano), self.label, item)

    def _read(self, stream: io.BufferedReader) -> Iterator[bytes | Item | str]:
        """Yield entries; of an entry that cannot be read, the reason in words."""
        if not _is_json(stream.peek(SNIFF_BYTES)[:SNIFF_BYTES]):
            return _entries(stream)
        lines = iter(lambda: stream.readline(EXPORT_BYTES_MAX), b"")  # some MB of gzip can be a line of GB
        return (self._line(line) for line in lines if not line.isspace())

    def _line(self, line: bytes) -> bytes | Item | str:
        if is_page_line(line):
            page = read_page_line(line, self.label)
            return f"pages cannot be learned from ({page})" if isinstance(page, PageProblem) else page
        if fpm.LINE_SIGNATURE in line:
            passed = fpm.read_line(line, self.label)
            why = f"records of forward passes cannot be learned from ({passed})"
            return why if isinstance(passed, Skip) else passed
        try:
            batch = read_line(line, self.label) if LINE_SIGNATURE in line else json_to_protobuf(line)
        except ValueError:
            return _NO_TRACES
        return _NO_TRACES if isinstance(batch, Skip) else batch


def by_kind(batch: Sequence[Timed]) -> dict[str, list[Any]]:
    """What a pipeline processes of a batch, by the names of its arguments."""
    return {name: [timed.item for timed in batch if isinstance(timed.item, kind)] for name, kind in _KINDS.items()}


def in_batches(timed: Iterable[Timed], bytes_max: int) -> Iterator[list[Timed]]:
    """Batches for the pipeline of at most this size, with one item at least."""
    batch: list[Timed] = []
    size_bytes = 0
    for item in timed:
        own_bytes = item.size_bytes
        if batch and size_bytes + own_bytes > bytes_max:
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += own_bytes
    if batch:
        yield batch


def merged(recordings: Iterable[Recording]) -> Iterator[Timed]:
    """Everything in event-time order; ties go by source and path, so the order of the arguments never matters."""
    ordered = sorted(recordings, key=lambda recording: (recording.label, recording.name))
    return heapq.merge(*ordered, key=lambda timed: (timed.unix_nano, timed.label))


_UPDATE_ITEMS = 64
"""Entries after which the bar is told how far it is: some milliseconds of work."""


def merged_with_progress(recordings: Sequence[Recording]) -> Iterator[Timed]:
    """As :func:`merged`, with a progress bar."""
    with progress("read", sum(recording.size_bytes for recording in recordings)) as bar:
        for number, timed in enumerate(merged(recordings)):
            yield timed
            if number % _UPDATE_ITEMS == 0:
                bar.update(sum(recording.position_bytes for recording in recordings) - bar.n)


# --- files ------------------------------------------------------------------------------------------------------------


def open_recordings(paths: Sequence[Path], warn: PrintLine, stdin: BinaryIO | None = None) -> list[Recording]:
    """Open files, the files of directories, and ``-``, which is ``stdin``; StartError for what cannot be."""
    files = recording_files(map(str, paths))
    return [
        Recording(Path(file), warn, source=source_of(file), stream=stdin if file == STDIN else None) for file in files
    ]


def by_source(recordings: Sequence[Recording]) -> list[list[Recording]]:
    """The recordings of each source together, in the order of their first ones."""
    sources: dict[str, list[Recording]] = {}
    for recording in recordings:
        sources.setdefault(recording.label, []).append(recording)
    return list(sources.values())


def recording_files(paths: Iterable[str]) -> list[str]:
    """Each file once: those that are named, and all below directories but for hidden ones, by name."""
    return list(dict.fromkeys(file for path in paths for file in _files(path)))


def check_targets(*targets: Path | None, read: Iterable[Path] = ()) -> None:
    """StartError where a result would take the place of a file that is read, of another result, or of no file at all.

    A result is renamed into its place, so that ``-o /dev/null``, or ``-o /dev/stdout > file``, of the root user would
    leave the machine without it.
    """
    taken = dict.fromkeys(map(os.path.realpath, recording_files(map(str, read))), "it is read")
    for target in filter(None, targets):
        is_descriptor = str(target) == STDIN or (target.is_symlink() and target.readlink().is_relative_to("/proc"))
        is_no_file = is_descriptor or (target.exists() and not target.is_file())
        why = "it is no file" if is_no_file else taken.get(os.path.realpath(target))
        if not target.absolute().parent.is_dir():
            why = "there is no such directory"
        if why:
            raise StartError(f"cannot write {target}: {why}")
        taken[os.path.realpath(target)] = "another result goes there"


def source_of(name: str) -> str:
    """Name of the source that a file, or an object, is a recording of."""
    partitioned = _PARTITIONED.fullmatch(name)
    if partitioned:
        return f"{partitioned['above']}/{partitioned['stem']}"
    folder, slash, file = name.rpartition("/")
    rotated = _ROTATED.fullmatch(file)
    return f"{folder}{slash}{rotated['stem']}{rotated['suffix'] or ''}" if rotated else name


def _files(path: str) -> Sequence[str]:
    path = os.path.normpath(path) if path != STDIN else path
    if not os.path.isdir(path):  # noqa: PTH112 -- a million files as Path objects are half a gigabyte
        return [path]
    names: list[str] = []
    for folder, folders, files in os.walk(path):  # a glob would follow links, in circles
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (f"{folder}/{name}" for name in files if not name.startswith("."))
        names += filter(os.path.isfile, paths)
    if not names:
        raise StartError(f"cannot read {path}: there is no file in it")
    return sorted(names, key=lambda name: name.split("/"))  # by their folders first, as pathlib has it
