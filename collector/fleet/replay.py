"""``tracefit fleet replay``: learn recordings of many engines on Ray, and write what a pull of their sidecars writes.

    files ─► cut by engine ─► pieces by bucket, in Ray's object store ─► one state an engine ─► merged by a pull

Ray starts on this machine for the while, or is a cluster by its address. It makes a task whose worker is killed and a
piece whose node is gone again. Pieces follow from the recordings alone, so that they are the same every time: what
is learned of an engine is what a replay of its telemetry alone learns, bit by bit, wherever that is done.

The time of an entry is the newest span end of its engine in its file so far, as in a recording of that engine alone.
KV events outside of an engine's own export go to every engine, and API spans to the engine whose requests name them as
their parents.
"""

from __future__ import annotations

import hashlib
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from collector.config import Config
from collector.decode import Export, parts_by_emitter
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.recordings import FILE_TRANSPORT, Timed, by_kind, in_batches
from collector.runtime import EXIT_FAILED, EXIT_INTERRUPTED, Clock, StartError, note, progress, say
from collector.service import TAKE_BYTES, check_learning, make_pipeline

from .pull import Puller, PullOptions, conclude, working_directory
from .sources import RecordedFile, find_recordings, open_recording

LOCAL: Final = "local"
TRIES: Final = 3
"""How often Ray makes a killed task or a failed read again, at most."""
BUCKETS: Final = 64
"""Groups of engines, by name: tasks that can learn at the same time."""
SHARED: Final = BUCKETS
"""The bucket of what may belong to any engine."""
PIECE_BYTES: Final = 64 << 20
"""What a task that cuts holds before it gives its pieces to the store: some 200 MB with itself."""
PART_BYTES, PART_FILES = 64 << 20, 4096
"""What one such task reads, as files lie there; a file is never divided."""
WORK_NAME: Final = ".replay"
_TALK: Final = {"OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Of every worker: one thread gives the same bytes on each machine; nothing is reported to anybody."""


class ReplayOptions(NamedTuple):
    """What a replay is asked for."""

    recordings: tuple[str, ...]
    out: Path
    ray: str = LOCAL


class EngineKey(NamedTuple):
    """The recording that an engine is in, and its name there."""

    recording: str
    instance: str

    @property
    def file_name(self) -> str:
        """The engine's name, for whoever reads which file was left out, and a digest that makes it the only one."""
        digest = hashlib.sha256("\0".join(self).encode("utf-8", "surrogateescape")).hexdigest()
        return f"engine-{urllib.parse.quote(self.instance, safe='', errors='replace')[:80]}-{digest[:16]}"


class Piece(NamedTuple):
    """What one engine says in some files: arrays by entry, which Ray shares without a copy.

    ``ids`` are eight bytes each: of API spans their own, of requests those of their parents.
    """

    key: EngineKey
    unix_nano: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    stops: NDArray[np.int64]
    payloads: NDArray[np.uint8]
    id_counts: NDArray[np.int64]
    ids: NDArray[np.uint64]


class Learned(NamedTuple):
    """An engine's state after all that it said, and how many rows are in it."""

    key: EngineKey
    state: bytes
    rows: int


def replay_fleet(options: ReplayOptions, config: Config, clock: Clock) -> int:
    """Learn every engine of the recordings, and write the fleet's files; failed if nothing was learned."""
    check_learning(config)
    ray, work = _import_ray(), options.out / WORK_NAME
    files = find_recordings(options.recordings)
    pull = PullOptions((str(work),), options.out, require=0.0)
    puller = Puller(pull, config, clock)
    puller.start()
    try:
        with working_directory(work):
            _connect(ray, options.ray)
            engines = rows = 0
            for learned in learn_files(ray, files, config):
                engines, rows = engines + 1, rows + learned.rows
                (work / f"{learned.key.file_name}.bin").write_bytes(learned.state)
            if not engines:
                note("error: nothing was learned")
                return EXIT_FAILED
            say(f"{len(files):,} files, {engines:,} engines, {rows:,} rows")
            return conclude(puller.pull(), pull)
    except KeyboardInterrupt:
        note("stopped: nothing was written")
        return EXIT_INTERRUPTED
    finally:
        ray.shutdown()
        puller.stop()


# --- files cut by engine ----------------------------------------------------------------------------------------------


def _parts(files: Sequence[RecordedFile]) -> list[list[RecordedFile]]:
    parts: list[list[RecordedFile]] = []
    size_bytes = 0
    for file in files:
        if not parts or size_bytes + file.size_bytes > PART_BYTES or len(parts[-1]) == PART_FILES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(file)
        size_bytes += file.size_bytes
    return parts


class _Entry(NamedTuple):
    unix_nano: int
    kind: int
    payload: bytes
    ids: bytes = b""


_KINDS: Final[tuple[type[Any], ...]] = (Export, KvBatch, ScrapedPage, ForwardPass)
"""An export is kept as its payload, the others as MessagePack."""


def cut(files: Sequence[RecordedFile]) -> Iterator[Any]:
    """Pieces of one bucket at a time; at last the bucket of each, and what was to be said."""
    buckets: list[int] = []
    warnings: list[str] = []
    gathered: dict[int, dict[EngineKey, list[_Entry]]] = {}

    def packed() -> Iterator[list[Piece]]:
        for bucket, engines in sorted(gathered.items()):
            buckets.append(bucket)
            yield [_pack(key, entries) for key, entries in engines.items()]
        gathered.clear()

    size_bytes = 0
    for file in files:
        newest: dict[str, int] = {}
        for timed in open_recording(file, warnings.append):
            for bucket, instance, entry in _entries_of(timed, newest):
                gathered.setdefault(bucket, {}).setdefault(EngineKey(timed.label, instance), []).append(entry)
                size_bytes += len(entry.payload)
            if size_bytes >= PIECE_BYTES:
                yield from packed()
                size_bytes = 0
    yield from packed()
    yield buckets, warnings


def _entries_of(timed: Timed, newest: dict[str, int]) -> Iterator[tuple[int, str, _Entry]]:
    """Bucket, engine and entry; ``newest`` is the time of each engine in this file so far."""
    said = timed.said
    if isinstance(said, Export):
        try:
            parts = parts_by_emitter(said.payload, timed.label)
        except ValueError:
            return  # its decoder could not read it either
        for part in parts:
            newest[part.instance] = max(newest.get(part.instance, 0), part.newest_end_unix_nano)
        for part in parts:
            entry = _Entry(newest[part.instance], 0, part.payload, part.ids)
            if not part.is_api:
                yield _bucket_of(part.instance), part.instance, entry
            elif part.ids:
                yield SHARED, part.instance, entry
        return
    kind, data = _KINDS.index(type(said)), msgspec.msgpack.encode(said)
    if isinstance(said, KvBatch):
        yield SHARED, "", _Entry(timed.unix_nano, kind, data)
        return
    if isinstance(said, ScrapedPage):
        newest[said.instance] = max(newest.get(said.instance, 0), said.unix_ns)
    yield _bucket_of(said.instance), said.instance, _Entry(newest.get(said.instance, said.unix_ns), kind, data)


def _bucket_of(instance: str) -> int:
    return zlib.crc32(instance.encode("utf-8", "surrogateescape")) % BUCKETS


def _pack(key: EngineKey, entries: list[_Entry]) -> Piece:
    return Piece(
        key,
        np.array([entry.unix_nano for entry in entries], np.int64),
        np.array([entry.kind for entry in entries], np.uint8),
        np.cumsum([len(entry.payload) for entry in entries], dtype=np.int64),
        np.frombuffer(b"".join(entry.payload for entry in entries), np.uint8),
        np.array([len(entry.ids) // 8 for entry in entries], np.int64),
        np.frombuffer(b"".join(entry.ids for entry in entries), "<u8"),
    )


def _unpack(piece: Piece, at: int) -> Timed:
    label, kind = piece.key.recording, _KINDS[piece.kinds[at]]
    data = piece.payloads[piece.stops[at - 1] if at else 0 : piece.stops[at]].tobytes()
    is_export = kind is Export
    said = Export(data, label, FILE_TRANSPORT, 0, label) if is_export else msgspec.msgpack.decode(data, type=kind)
    return Timed(int(piece.unix_nano[at]), label, said)


# --- engines learned --------------------------------------------------------------------------------------------------


def learn_bucket(config: Config, own: Sequence[Piece], shared: Sequence[Piece]) -> list[Learned]:
    """Every engine of a bucket, one after the other, each as a replay of its telemetry alone."""
    learned = []
    for key in sorted({piece.key for piece in own}):
        pipeline = make_pipeline(config)
        for batch in in_batches(_in_time_order([piece for piece in own if piece.key == key], shared), TAKE_BYTES):
            pipeline.process(**by_kind(batch))
        pipeline.flush()
        if pipeline.learned_rows:
            learned.append(Learned(key, pipeline.state(), pipeline.learned_rows))
    return learned


def _in_time_order(own: Sequence[Piece], shared: Sequence[Piece]) -> Iterator[Timed]:
    """What an engine says, and what it needs of the rest; ties go by recording, then in the order of files."""
    parents = np.unique(np.concatenate([piece.ids for piece in own]))
    needed = [(piece, np.arange(len(piece.kinds))) for piece in own]
    for piece in shared:
        is_needed = piece.id_counts == 0  # KV events
        is_needed[np.repeat(np.arange(len(is_needed)), piece.id_counts)[np.isin(piece.ids, parents)]] = True
        needed.append((piece, np.flatnonzero(is_needed)))
    needed.sort(key=lambda each: each[0].key.recording)
    unix_nano = np.concatenate([piece.unix_nano[places] for piece, places in needed])
    pieces = np.repeat(np.arange(len(needed)), [len(places) for _, places in needed])
    places = np.concatenate([places for _, places in needed])
    for at in np.argsort(unix_nano, kind="stable").tolist():
        yield _unpack(needed[pieces[at]][0], places[at])


# --- on Ray -----------------------------------------------------------------------------------------------------------


def learn_files(ray: Any, files: Sequence[RecordedFile], config: Config) -> Iterator[Learned]:
    """Every engine of the files, in any order; StartError if Ray gives up."""
    cut_on_ray = ray.remote(num_returns="streaming", max_retries=TRIES, retry_exceptions=[OSError])(cut)
    learn_on_ray = ray.remote(max_retries=TRIES)(learn_references)
    parts = _parts(files)
    streams = [cut_on_ray.remote(part) for part in parts]
    refs_of: dict[int, list[Any]] = {SHARED: []}
    with progress("cut", sum(file.size_bytes for file in files)) as bar:
        for part, stream in zip(parts, streams, strict=True):
            *refs, last = stream
            buckets, warnings = _value_of(ray, last)
            for text in warnings:
                note(text)
            for bucket, ref in zip(buckets, refs, strict=True):
                refs_of.setdefault(bucket, []).append(ref)
            bar.update(sum(file.size_bytes for file in part))
    shared = refs_of.pop(SHARED)
    learning = [learn_on_ray.remote(config, own, shared) for own in refs_of.values()]
    with progress("learned", len(learning), "groups of engines") as bar:
        for learned in learning:
            yield from _value_of(ray, learned)
            bar.update()


def learn_references(config: Config, own: Sequence[Any], shared: Sequence[Any]) -> list[Learned]:
    """As ``learn_bucket``, of pieces in the object store."""
    ray = _import_ray()
    own_pieces, shared_pieces = ([piece for each in ray.get(list(refs)) for piece in each] for refs in (own, shared))
    return learn_bucket(config, own_pieces, shared_pieces)


def _value_of(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        raise StartError(f"Ray gave up: {getattr(error, 'cause', error)}") from None


def _connect(ray: Any, address: str) -> None:
    settings = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": _TALK}, **settings)
    except Exception as error:  # noqa: BLE001 -- Ray has an error of its own for each way not to be there
        raise StartError(f"no Ray at {address}: {error}") from None


def _import_ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ImportError:
        raise StartError("`fleet replay` needs Ray: install tracefit's extra fleet") from None
    return ray
