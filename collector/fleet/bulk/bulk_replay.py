"""Recordings of many engines, learned engine by engine: what is done in which order, and how far it is.

    files ─► parts ─► shards by bucket of engines ─► one state a bucket ─► merged by whoever asked

Which process does what changes nothing: parts, buckets and the order of every sum follow from the recordings.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from collector import __version__
from collector.config import Config
from collector.fleet.pull import NEVER_NS, Examined, add, choose, examine
from collector.fleet.state_fetch import Fetched, StatePlace
from collector.recordings import STDIN
from collector.runtime import Clock, PrintLine, Progress, StartError
from collector.service import Directory
from online import Bank

from .learn import Learned, for_merging
from .runners import BucketTask, ShardPlace, SplitDone
from .shards import SHARED, BulkFile, Part, StoreError, parts_of

_FINGERPRINT: Final = "replay.fingerprint"


class Runner(Protocol):
    """Who does the tasks; both yield what is done as it is done."""

    def split_parts(self, parts: Sequence[Part]) -> Iterator[tuple[Part, SplitDone]]:
        """Split files into shards."""
        ...

    def learn_buckets(self, tasks: Sequence[BucketTask]) -> Iterator[tuple[BucketTask, Learned]]:
        """Learn the engines of each bucket."""
        ...

    def close(self) -> None:
        """End what was started for it."""
        ...


class Replayed(NamedTuple):
    """Where the states of all buckets are; how many engines and rows are in them."""

    states: list[Path]
    engines: int
    rows: int


class WorkDirectory:
    """What is done of a replay; another replay's is thrown away, and all of it at the end. One process at a time."""

    def __init__(self, path: Path, clock: Clock, note: PrintLine) -> None:
        self.path = path
        self._directory = Directory(path, clock, "its work directory")
        self._note = note

    def take(self, files: Sequence[BulkFile], config: Config, rows: str = "") -> None:
        """Lock it, and keep what is in it if it is of the same files, settings and version."""
        self._directory.take()
        digest = hashlib.sha256()
        for known in (__version__, msgspec.json.encode(config), rows, *files):  # of which there may be a million
            digest.update(repr(known).encode("ascii", "backslashreplace"))
        fingerprint = digest.hexdigest()
        marker = self.path / _FINGERPRINT
        if marker.exists() and marker.read_text() == fingerprint and all(file.name != STDIN for file in files):
            if any(path.suffix in {".json", ".bin"} for path in self.path.iterdir()):
                self._note(f"going on with what is done already in {self.path}")
            return
        for path in self.path.iterdir():
            if path.suffix in {".json", ".shard", ".bin", ".previous"}:
                path.unlink()
        marker.write_text(fingerprint)

    def release(self) -> None:
        """Let another process in; what is done stays."""
        self._directory.release()

    def remove(self) -> None:
        """All of it was used."""
        self._directory.release()
        shutil.rmtree(self.path, ignore_errors=True)


def replay_in_bulk(
    files: Sequence[BulkFile],
    config: Config,
    runner: Runner,
    work: Path,
    clock: Clock,
    note: PrintLine,
    rows: str = "",
) -> Replayed:
    """Learn every engine of these files; the states are files of ``work``, the rows go to ``rows``, if anywhere.

    Raises:
        StartError: a file cannot be read, or workers were killed again and again.
    """
    parts = parts_of(files)
    try:
        splits = _split(parts, runner, clock, note)
        tasks = _tasks(splits, config, rows)
        learned: dict[int, Learned] = {}
        with Progress("learned", sum(task.size_bytes for task in tasks), clock, note) as progress:
            for task, result in runner.learn_buckets(tasks):
                learned[task.bucket] = result
                progress.advance(task.size_bytes)
    except StoreError as error:
        raise StartError(str(error)) from None
    except OSError as error:
        raise StartError(f"cannot write to {work}: {error.strerror}") from None
    states = []
    for bucket, result in sorted(learned.items()):
        for text in result.refused:
            note(text)
        if result.state:
            states.append(work / f"bucket-{bucket:02}.bin")
            if not states[-1].exists():
                states[-1].write_bytes(result.state)
    return Replayed(states, sum(each.engines for each in learned.values()), sum(each.rows for each in learned.values()))


def _split(parts: Sequence[Part], runner: Runner, clock: Clock, note: PrintLine) -> dict[int, SplitDone]:
    splits: dict[int, SplitDone] = {}
    with Progress("split", sum(part.size_bytes for part in parts), clock, note) as progress:
        for part, done in runner.split_parts(parts):
            splits[part.number] = done
            progress.advance(part.size_bytes)
    for _, done in sorted(splits.items()):
        for warning in done.warnings:
            note(warning)
    return splits


def _tasks(splits: dict[int, SplitDone], config: Config, rows: str) -> list[BucketTask]:
    """The largest first, so that none is left when the others are done."""
    shards: dict[int, list[ShardPlace]] = {}
    for _, done in sorted(splits.items()):
        for shard in done.shards:
            shards.setdefault(shard.bucket, []).append(shard)
    shared = tuple(shards.pop(SHARED, ()))
    tasks = [BucketTask(bucket, config, tuple(own), shared, rows) for bucket, own in shards.items()]
    return sorted(tasks, key=lambda task: (-task.size_bytes, task.bucket))


def bank_of(replayed: Replayed, config: Config, note: PrintLine) -> Bank | None:
    """What all buckets teach, merged; None if nothing."""
    whole = for_merging(config)
    read = [examine(Fetched(StatePlace(path.name, path=path), path), path, whole, NEVER_NS) for path in replayed.states]
    chosen, refused = choose([each for each in read if isinstance(each, Examined)])
    for each in [*refused, *(each for each in read if isinstance(each, Fetched))]:
        note(f"{each.place.name}: {each.detail}")
    return add(chosen, whole) if chosen else None
