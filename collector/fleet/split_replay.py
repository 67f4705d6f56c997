"""Recordings learned engine by engine, in as many processes as there are cores, and merged.

    every worker:  files ─► decode ─► telemetry of its engines ─► a pipeline for each ─► a state for each
    afterwards:    states ─► one, in the order of event time

Every worker reads and decodes everything (what that costs: ``make bench WHAT=fleet ARGS=split``), and learns from the
engines that are its own by their names; API spans and KV events, which belong to whoever waits for them, reach every
engine. An engine that is silent for twice the join's window has ended: its state is taken, and its memory is free.

Guarantee: which process learns an engine changes nothing of it, so that any number of workers gives the same bytes.
They are those of a merge: within two per cent of one learner that was fed everything, and without what cannot be added.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from collector.config import Config
from collector.decode import Telemetry
from collector.recordings import Timed, TimedExport, TimedKv, TimedPage, in_batches, merged, open_recordings
from collector.runtime import PrintLine, StartError
from collector.telemetry import Counts
from collector.worker import Pipeline, TelemetryReader, make_pipeline
from online import Bank

from .fold import Examined, add, choose, examine
from .state_fetch import Fetched
from .state_places import StatePlace

API_KEPT = 1024
"""Batches of API spans kept for an engine that is heard of later than they are."""
SILENT_WINDOWS = 2
ENGINES_MAX = 10_000

Key = tuple[str, str]
"""Recording and instance."""


class Share(NamedTuple):
    """What one worker learns: engines whose names fall to ``number`` of ``workers``; states go to ``directory``."""

    paths: tuple[Path, ...]
    config: Config
    directory: Path
    number: int
    workers: int


@dataclass(slots=True)
class _Engine:
    pipeline: Pipeline
    heard_unix_ns: int
    waiting: list[tuple[str, Telemetry]]
    """Decoded, and joined with the rest of its batch."""


class ShareLearner:
    """Pipelines of one worker's engines."""

    def __init__(self, config: Config, is_mine: Callable[[Key], bool], keep: Callable[[Key, bytes], None]) -> None:
        self._config = config
        self._is_mine = is_mine
        self._keep = keep
        self._reader = TelemetryReader(config.dedupe)
        self._engines: dict[Key, _Engine] = {}
        self._broadcast: deque[tuple[str, Telemetry]] = deque(maxlen=API_KEPT)
        self._silent_ns = int(SILENT_WINDOWS * config.join.window_s * 1e9)

    def learn(self, batch: Sequence[Timed]) -> None:
        """Take what a batch says of the engines that are this worker's."""
        for timed in batch:
            if isinstance(timed, TimedKv):
                self._tell_all(timed.label, Telemetry("", {}, kv=[timed.batch]))
            elif isinstance(timed, TimedPage):
                key = (timed.page.recording, timed.page.instance)
                if self._is_mine(key):
                    self._engine(key, timed.unix_nano).pipeline.process_pages([timed.page])
        exports = [timed.export for timed in batch if isinstance(timed, TimedExport)]
        for decoded in self._reader.read(exports, Counts()):
            for recording, telemetry in decoded:
                self._dispatch(recording, telemetry, batch[-1].unix_nano)
            self._join()
        self._end_silent(batch[-1].unix_nano)

    def end(self) -> None:
        """Nothing more comes: every engine's state is taken."""
        for key in list(self._engines):
            self._end(key)

    def _join(self) -> None:
        for engine in self._engines.values():
            if engine.waiting:
                engine.pipeline.process_telemetry(engine.waiting)
                engine.waiting = []

    def _dispatch(self, recording: str, telemetry: Telemetry, unix_ns: int) -> None:
        key = (recording, telemetry.instance)
        if (len(telemetry.steps) or telemetry.core or telemetry.requests) and self._is_mine(key):
            own = replace(telemetry, api=[], kv=[])
            self._engine(key, unix_ns).waiting.append((recording, own))
        if telemetry.api or telemetry.kv:
            self._tell_all(
                recording, Telemetry(telemetry.instance, telemetry.facts, api=telemetry.api, kv=telemetry.kv)
            )

    def _tell_all(self, recording: str, telemetry: Telemetry) -> None:
        self._broadcast.append((recording, telemetry))
        for engine in self._engines.values():
            engine.waiting.append((recording, telemetry))

    def _engine(self, key: Key, unix_ns: int) -> _Engine:
        engine = self._engines.get(key)
        if engine is None:
            if len(self._engines) >= ENGINES_MAX:
                raise StartError(f"more than {ENGINES_MAX} engines at a time: use more workers")
            engine = self._engines[key] = _Engine(make_pipeline(self._config), unix_ns, list(self._broadcast))
        engine.heard_unix_ns = unix_ns
        return engine

    def _end_silent(self, now_unix_ns: int) -> None:
        for key, engine in list(self._engines.items()):
            if now_unix_ns - engine.heard_unix_ns > self._silent_ns:
                self._end(key)

    def _end(self, key: Key) -> None:
        engine = self._engines.pop(key)
        pipeline = engine.pipeline
        pipeline.process_telemetry(engine.waiting)
        pipeline.flush()
        if pipeline.learned_rows:
            self._keep(key, pipeline.state())


def replay_split(paths: Sequence[Path], config: Config, workers: int, note: PrintLine) -> Bank | None:
    """What all engines of some recordings teach, merged; None if nothing.

    Raises:
        StartError: a recording cannot be read, or a worker was killed.
    """
    if any(str(path) == "-" for path in paths):
        raise StartError("standard input can be read by one only: without --workers")
    bank = msgspec.structs.replace(config.bank, configs_max=ENGINES_MAX)
    whole = msgspec.structs.replace(config, bank=bank)
    with tempfile.TemporaryDirectory(prefix="tracefit-replay-") as scratch:
        shares = [Share(tuple(paths), config, Path(scratch), number, workers) for number in range(workers)]
        for warnings in _run(shares):
            for warning in warnings:
                note(warning)
        examined = list(_examined(Path(scratch), whole))
        chosen, refused = choose(examined)
        for each in refused:
            note(f"{each.place.name}: {each.detail}")
        return add(chosen, whole) if chosen else None


def _run(shares: Sequence[Share]) -> Iterator[list[str]]:
    if len(shares) == 1:
        yield learn_share(shares[0])
        return
    # forked children would share the locks of threads that are not there
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(learn_share, shares)
        except BrokenProcessPool:
            raise StartError("a worker was killed (out of memory?); nothing was written") from None


def learn_share(share: Share) -> list[str]:
    """One worker from beginning to end; what it had to say of the recordings, if it is the first."""
    warnings: list[str] = []

    def is_mine(key: Key) -> bool:
        return zlib.crc32("\0".join(key).encode("utf-8", "surrogateescape")) % share.workers == share.number

    lives: list[Key] = []

    def keep(key: Key, state: bytes) -> None:
        lives.append(key)
        stem = f"{share.number}-{len(lives)}"
        (share.directory / f"{stem}.bin").write_bytes(state)
        (share.directory / f"{stem}.name").write_bytes(msgspec.json.encode(key))

    learner = ShareLearner(share.config, is_mine, keep)
    recordings = open_recordings(share.paths, warnings.append)
    for batch in in_batches(merged(recordings), share.config.queue.batch_bytes):
        learner.learn(batch)
    learner.end()
    return warnings if share.number == 0 else []


def _examined(directory: Path, config: Config) -> Iterator[Examined]:
    for path in sorted(directory.glob("*.bin")):
        recording, instance = msgspec.json.decode(path.with_suffix(".name").read_bytes())
        place = StatePlace(f"{recording}: {instance}", path=path)
        examined = examine(Fetched(place, path), path, config, 1 << 62)
        if isinstance(examined, Examined):
            yield examined
