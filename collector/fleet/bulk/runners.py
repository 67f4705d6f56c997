"""Who works on shards: processes of this machine, or Ray.

Tasks of a replay in bulk on this machine: in this process, or in several; what is done stays on disk.

    WORK/part-000003.json    what a part was split into, written when it is
    WORK/*.shard             the shards
    WORK/bucket-17.bin       what a bucket taught, and bucket-17.json beside it

A replay that is stopped, or killed, and started again goes on with what is not there yet. A worker that is killed
changes nothing but the time it takes: its task is done again, ``TRIES`` times at most.

Tasks of a replay in bulk on Ray: shards are objects of its store, which spills them, and moves them to who learns.

A task whose worker is killed, and an object whose node is gone, is made again by Ray: both halves give the same bytes
however often they are done. Ray and its store are the caller's; ``local`` starts one on this machine for the while.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from collector.config import Config
from collector.recordings import STDIN
from collector.runtime import StartError
from exporters.snapshot_file import write_atomically

from .learn import Learned, learn_bucket
from .shards import Part, Shard, StoreError, split

TRIES: Final = 3
_A = TypeVar("_A")
_R = TypeVar("_R")


class ShardPlace(NamedTuple):
    """A shard's bucket, where it lies, and its size."""

    bucket: int
    where: Any
    size_bytes: int


class SplitDone(NamedTuple):
    """What a part became, and what was to be said of its files."""

    shards: tuple[ShardPlace, ...]
    warnings: tuple[str, ...]


class BucketTask(NamedTuple):
    """A bucket, the shards with its engines, and those that hold what may belong to any engine."""

    bucket: int
    config: Config
    shards: tuple[ShardPlace, ...]
    shared: tuple[ShardPlace, ...]
    rows: str = ""
    """Where their rows go, if anywhere."""

    @property
    def size_bytes(self) -> int:
        """What its engines said."""
        return sum(shard.size_bytes for shard in self.shards)


class LocalRunner:
    """Tasks in ``workers`` processes, or in this one if it is one; ``work`` is the directory for what is done."""

    def __init__(self, work: Path, workers: int, stdin: BinaryIO | None = None) -> None:
        self._work = work
        self._workers = workers
        self._stdin = stdin
        self._pool: ProcessPoolExecutor | None = None

    def split_parts(self, parts: Sequence[Part]) -> Iterator[tuple[Part, SplitDone]]:
        """Each part when it is split, in any order."""
        here = [part for part in parts if any(file.name == STDIN for file in part.files)]
        for part in here:  # nobody else has the standard input
            yield part, split_into(part, self._work, self._stdin)
        yield from self._run(partial(split_into, work=self._work), [part for part in parts if part not in here])

    def learn_buckets(self, tasks: Sequence[BucketTask]) -> Iterator[tuple[BucketTask, Learned]]:
        """Each bucket when it is learned, in any order."""
        yield from self._run(partial(learn_into, work=self._work), tasks)

    def close(self) -> None:
        """End the processes, whatever they do."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):  # noqa: SLF001 -- the one way to end what runs
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _run(self, function: Callable[[_A], _R], arguments: Sequence[_A]) -> Iterator[tuple[_A, _R]]:
        if self._workers == 1:
            for argument in arguments:
                yield argument, function(argument)
            return
        todo = dict(enumerate(arguments))
        for left in reversed(range(TRIES)):
            try:
                for number, result in self._in_pool(function, todo):
                    yield todo.pop(number), result
            except BrokenProcessPool:
                self.close()
                if not left:
                    raise StartError(
                        f"workers were killed {TRIES} times (out of memory?); nothing was written"
                    ) from None
            else:
                return

    def _in_pool(self, function: Callable[[_A], _R], todo: Mapping[int, _A]) -> Iterator[tuple[int, _R]]:
        if self._pool is None:
            # forked children would share the locks of threads that are not there
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, initializer=_begin_worker)
        running: dict[Future[_R], int] = {self._pool.submit(function, argument): n for n, argument in todo.items()}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


def _begin_worker() -> None:
    """Ctrl-C is for the process that was started; it ends the others, also by being killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def learn_into(task: BucketTask, work: Path) -> Learned:
    """Learn a bucket, or read what it taught before."""
    path = work / f"bucket-{task.bucket:02}"
    try:
        about = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Learned)
        return about._replace(state=path.with_suffix(".bin").read_bytes() if about.engines else b"")
    except FileNotFoundError:
        pass
    shards, shared = ([_opened(shard) for shard in places] for places in (task.shards, task.shared))
    learned = learn_bucket(task.config, shards, shared, task.rows)
    if learned.engines:
        write_atomically(path.with_suffix(".bin"), learned.state)
    write_atomically(path.with_suffix(".json"), msgspec.json.encode(learned._replace(state=b"")))
    return learned


def split_into(part: Part, work: Path, stdin: BinaryIO | None = None) -> SplitDone:
    """Split a part, or read what it was split into before."""
    manifest = work / f"part-{part.number:06}.json"
    try:
        done = msgspec.json.decode(manifest.read_bytes(), type=SplitDone)
        return done._replace(shards=tuple(ShardPlace(*shard) for shard in done.shards))
    except FileNotFoundError:
        pass
    warnings: list[str] = []
    shards = []
    for number, (bucket, shard) in enumerate(split(part, warnings.append, stdin)):
        path = work / f"{part.number:06}-{number:05}.shard"
        with path.open("wb") as file:
            file.writelines(shard)
        shards.append(ShardPlace(bucket, str(path), sum(map(len, shard))))
    done = SplitDone(tuple(shards), tuple(warnings))
    write_atomically(manifest, msgspec.json.encode(done))
    return done


def _opened(shard: ShardPlace) -> Shard:
    def map_file() -> memoryview:
        with Path(shard.where).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    return map_file


LOCAL: Final = "local"
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""As the command line sets it: one thread, the same bytes."""


class RayRunner:
    """Tasks on the cluster at ``address``."""

    def __init__(self, address: str) -> None:
        self._ray = _ray()
        settings: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": _ENVIRONMENT}}
        if address == LOCAL:
            settings |= {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        else:
            settings["address"] = address
        try:
            self._ray.init(**settings)
        except Exception as error:  # noqa: BLE001 -- Ray has an error of its own for each way not to be there
            raise StartError(f"no Ray at {address}: {error}") from None
        self._split = self._ray.remote(num_returns="streaming", max_retries=TRIES)(split_for_ray)
        self._learn = self._ray.remote(max_retries=TRIES)(learn_for_ray)

    def split_parts(self, parts: Sequence[Part]) -> Iterator[tuple[Part, SplitDone]]:
        """Each part when it is split, in any order."""
        running = {(shards := self._split.remote(part)).completed(): (part, shards) for part in parts}
        for done in self._each(list(running)):
            part, shards = running[done]
            *refs, last = list(shards)
            about, warnings = self._value_of(last)
            places = tuple(ShardPlace(bucket, ref, size) for (bucket, size), ref in zip(about, refs, strict=True))
            yield part, SplitDone(places, tuple(warnings))

    def learn_buckets(self, tasks: Sequence[BucketTask]) -> Iterator[tuple[BucketTask, Learned]]:
        """Each bucket when it is learned, in any order."""
        running = {self._learn.remote(task): task for task in tasks}
        for done in self._each(list(running)):
            yield running[done], self._value_of(done)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._ray.shutdown()

    def _each(self, running: list[Any]) -> Iterator[Any]:
        while running:
            done, running = self._ray.wait(running)
            yield from done

    def _value_of(self, ref: Any) -> Any:
        try:
            return self._ray.get(ref)
        except (StartError, StoreError) as error:
            raise StartError(str(getattr(error, "cause", error))) from None
        except self._ray.exceptions.RayError as error:
            raise StartError(f"Ray gave up: {getattr(error, 'cause', error)}") from None


def split_for_ray(part: Part) -> Iterator[Any]:
    """The shards of a part, as arrays that are shared and not copied, and at last what they are."""
    warnings: list[str] = []
    about: list[tuple[int, int]] = []
    for bucket, pieces in split(part, warnings.append):
        shard = b"".join(pieces)
        about.append((bucket, len(shard)))
        yield np.frombuffer(shard, np.uint8)
    yield about, warnings


def learn_for_ray(task: BucketTask) -> Learned:
    """Learn a bucket from shards in the object store."""
    ray = _ray()

    def opened(place: ShardPlace) -> Shard:
        return lambda: memoryview(ray.get(place.where))

    return learn_bucket(
        task.config, [opened(each) for each in task.shards], [opened(s) for s in task.shared], task.rows
    )


def _ray() -> Any:
    with contextlib.suppress(ImportError):
        import ray  # noqa: PLC0415

        return ray
    raise StartError("--ray needs packages that are not installed: install tracefit's extra fleet")
