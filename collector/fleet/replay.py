"""``tracefit fleet replay``: learn recordings of many engines on Ray, and write what a pull of their sidecars writes.

    files ─► cut by engine ─► batches by bucket, in Ray's object store ─► one state an engine ─► merged by a pull

Ray starts on this machine for the while, or is a cluster by its address. It makes a task whose worker is killed and a
batch whose node is gone again. Batches follow from the recordings alone, so that they are the same every time: what
is learned of an engine is the same bit by bit, wherever that is done.

The time of an entry is that which it has in its recording. KV events outside of an engine's own export go to every
engine, and API spans to the engine whose requests name them as their parents.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from collector.config import Config
from collector.decode import Export, parts_by_emitter
from collector.decode.kv import KvBatch
from collector.recordings import Timed, by_kind, in_batches
from collector.runtime import EXIT_FAILED, StartError, print_stderr, print_stdout, progress
from collector.service import TAKE_BYTES, make_pipeline

from .pull import Puller, conclude, working_directory
from .sources import find_recordings, open_recording

LOCAL: Final = "local"
TRIES: Final = 3
"""How often Ray makes a killed task or a failed read again, at most."""
TASKS: Final = 256
"""How many tasks cut the files, at most; a file is never divided."""
BUCKETS: Final = 64
"""Groups of engines by name; each group is learned by its own task."""
SHARED: Final = BUCKETS
"""The bucket of what may belong to any engine."""
BATCH_BYTES: Final = 64 << 20
"""What a task that cuts holds before it gives its batches to the store."""
WORK_NAME: Final = ".replay"
_TALK: Final = {"OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Of every worker: one thread gives the same bytes on each machine; nothing is reported to anybody."""


class EngineKey(NamedTuple):
    """The recording that an engine is in, and its name there."""

    recording: str
    instance: str


class Entry(NamedTuple):
    """One item of an engine; ``ids`` are those of its API spans, or of the parents of its requests."""

    timed: Timed
    ids: frozenset[bytes] = frozenset()


Batch = dict[EngineKey, list[Entry]]
"""Entries of a bucket's engines from some files, in their order."""


class EngineState(NamedTuple):
    """An engine's state after all its telemetry, and how many rows are in it."""

    instance: str
    state: bytes
    rows: int


def replay_fleet(recordings: Sequence[str], out: Path, config: Config, address: str) -> int:
    """Learn every engine of the recordings, and write the fleet's files; failed if nothing was learned.

    ``address`` is that of a Ray cluster.
    """
    ray, work = _import_ray(), out / WORK_NAME
    files = find_recordings(recordings)
    puller = Puller((str(work),), out, config, require=0.0)
    puller.start()
    try:
        with working_directory(work):
            _connect(ray, address)
            engines = rows = 0
            for learned in learn_files(ray, files, config):
                engines, rows = engines + 1, rows + learned.rows
                (work / f"{engines}.bin").write_bytes(learned.state)
            if not engines:
                print_stderr("error: nothing was learned")
                return EXIT_FAILED
            print_stdout(f"{len(files):,} files, {engines:,} engines, {rows:,} rows")
            return conclude(puller.pull(), out)
    finally:
        ray.shutdown()
        puller.stop()


# --- files cut by engine ----------------------------------------------------------------------------------------------


def cut(files: Sequence[str]) -> Iterator[Any]:
    """Yield batches of one bucket each; at last the bucket of each batch, and the warnings."""
    buckets: list[int] = []
    warnings: list[str] = []
    gathered: dict[int, Batch] = {}

    def batches() -> Iterator[Batch]:
        buckets.extend(sorted(gathered))
        for bucket in sorted(gathered):
            yield gathered.pop(bucket)

    size_bytes = 0
    for file in files:
        for timed in open_recording(file, warnings.append):
            for bucket, instance, entry in _entries_of(timed):
                gathered.setdefault(bucket, {}).setdefault(EngineKey(timed.label, instance), []).append(entry)
            size_bytes += timed.size_bytes
            if size_bytes >= BATCH_BYTES:
                yield from batches()
                size_bytes = 0
    yield from batches()
    yield buckets, warnings


def _entries_of(timed: Timed) -> Iterator[tuple[int, str, Entry]]:
    """Bucket, engine and entry."""
    item, label = timed.item, timed.label
    if isinstance(item, KvBatch):
        yield SHARED, "", Entry(timed)
    elif isinstance(item, Export):
        with contextlib.suppress(ValueError):  # its decoder could not read it either
            for part in parts_by_emitter(item.payload, label):
                own = timed._replace(item=Export(part.payload, label, 0, label))
                if not part.is_api or part.ids:
                    yield SHARED if part.is_api else _bucket_of(part.instance), part.instance, Entry(own, part.ids)
    else:
        yield _bucket_of(item.instance), item.instance, Entry(timed)


def _bucket_of(instance: str) -> int:
    return zlib.crc32(instance.encode("utf-8", "surrogateescape")) % BUCKETS


# --- engines learned --------------------------------------------------------------------------------------------------


def learn_bucket(config: Config, own_batches: int, *batches: Batch) -> list[EngineState]:
    """Learn the engines of a bucket one after the other, each as a replay of its telemetry alone.

    The first ``own_batches`` are of the bucket, the others of what may belong to any engine.
    """
    own, shared = batches[:own_batches], batches[own_batches:]
    learned = []
    for key in sorted({key for batch in own for key in batch}):
        entries = [entry for batch in own for entry in batch.get(key, ())]
        parents = frozenset[bytes]().union(*(entry.ids for entry in entries))
        others = [entry for batch in shared for values in batch.values() for entry in values]
        entries += [entry for entry in others if not entry.ids or entry.ids & parents]  # without ids: KV events
        timed = sorted((entry.timed for entry in entries), key=lambda timed: (timed.unix_nano, timed.label))
        pipeline = make_pipeline(config)
        for batch in in_batches(timed, TAKE_BYTES):
            pipeline.process(**by_kind(batch))
        pipeline.flush()
        if pipeline.learned_rows:
            learned.append(EngineState(key.instance, pipeline.state(), pipeline.learned_rows))
    return learned


# --- on Ray -----------------------------------------------------------------------------------------------------------


def learn_files(ray: Any, files: Sequence[str], config: Config) -> Iterator[EngineState]:
    """Every engine of the files, in any order; StartError if Ray gives up."""
    cut_on_ray = ray.remote(num_returns="streaming", max_retries=TRIES, retry_exceptions=[OSError])(cut)
    learn_on_ray = ray.remote(max_retries=TRIES)(learn_bucket)
    at_once = -(-len(files) // TASKS)
    streams = [cut_on_ray.remote(files[at : at + at_once]) for at in range(0, len(files), at_once)]
    refs_of: dict[int, list[Any]] = {SHARED: []}
    with progress("cut", len(streams), "groups of files") as bar:
        for stream in streams:
            *refs, last = stream
            buckets, warnings = _value_of(ray, last)
            for text in warnings:
                print_stderr(text)
            for bucket, ref in zip(buckets, refs, strict=True):
                refs_of.setdefault(bucket, []).append(ref)
            bar.update()
    shared = refs_of.pop(SHARED)
    learning = [learn_on_ray.remote(config, len(own), *own, *shared) for own in refs_of.values()]
    with progress("learned", len(learning), "groups of engines") as bar:
        for learned in learning:
            yield from _value_of(ray, learned)
            bar.update()


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
