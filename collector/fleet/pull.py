"""``tracefit fleet pull``: one round of asking every source, and what is written after it.

    OUT/snapshot.json, <config>.blis.yaml    by configuration
    OUT/states/<config>.bin                  what that is made of, for donors and further merges
    OUT/all/...                              the same for all that run one model on one GPU

Every file is replaced as one step, states before the snapshot. A configuration that no source knows any more leaves the
snapshot; its state stays. One process writes to a directory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from collector.config import Config
from collector.durable import Directory
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, PrintLine, Progress, StartError
from collector.telemetry import PullOutcome
from collector.worker import check_learning
from exporters.snapshot_file import SNAPSHOT_NAME, published_generation, write_atomically, write_snapshot
from exporters.status_page import FleetSource
from online import Bank, Snapshot, StateError

from .fleet_document import alone, by_model_and_gpu, fleet_snapshot
from .fold import NEVER_NS, Examined, add, choose, examine
from .merge import differing
from .state_fetch import Fetched, StateFetcher
from .state_places import check_sources, look

ALL_NAME, STATES_NAME, KEPT_NAME = "all", "states", ".pull"
CONFIGS_MAX = 10_000
CONNECTIONS = 16
_SOURCES_NAMED = 20


class PullOptions(NamedTuple):
    """What a pull is asked for."""

    sources: tuple[str, ...]
    out: Path
    timeout_s: float = 10.0
    require: float = 0.5
    """Share of the sources that must be merged, or nothing is written."""
    token: Callable[[], str] = str
    of_any_time: bool = False
    """Rows of the future are no sign of a wrong clock: they are of recordings."""


class Pulled(NamedTuple):
    """What a round came to."""

    sources: list[FleetSource]
    snapshot: Snapshot | None = None
    problem: str = ""
    """Why nothing was written."""


class Puller:
    """Rounds over the same sources; one thread at a time."""

    def __init__(self, options: PullOptions, config: Config, clock: Clock, note: PrintLine) -> None:
        check_learning(config)
        check_sources(options.sources)
        bank = msgspec.structs.replace(config.bank, configs_max=CONFIGS_MAX)
        self._config = msgspec.structs.replace(config, bank=bank)
        self._options = options
        self._clock = clock
        self._note = note
        self._directory = Directory(options.out, clock, "OUT")
        self._fetcher: StateFetcher | None = None
        self._stopping = threading.Event()
        self._written: list[bytes] = []
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        """Take the directory; StartError if another process has it."""
        out = self._options.out
        self._directory.take()
        try:
            for name in ("", ALL_NAME):
                (out / name / STATES_NAME).mkdir(parents=True, exist_ok=True)
            self._fetcher = StateFetcher(out / KEPT_NAME, self._clock, self._options.timeout_s, self._options.token)
        except OSError as error:
            raise StartError(f"cannot write to OUT {out}: {error.strerror}") from None

    def stop(self) -> bool:
        """Let another process in."""
        if self._fetcher is not None:
            self._fetcher.close()
        self._directory.release()
        return True

    def pull(self, *, is_shown: bool = False) -> Pulled:
        """Ask every source, merge, write; if shown, with how many were asked."""
        assert self._fetcher is not None, "pull comes after start"  # noqa: S101
        places = look(self._options.sources)
        self._fetcher.keep_only(places)
        fetched = []
        note = self._note if is_shown else _say_nothing
        with (
            ThreadPoolExecutor(CONNECTIONS, "fleet-fetch") as pool,
            Progress("asked", len(places), self._clock, note, "sources") as progress,
        ):
            for answer in pool.map(self._fetcher.fetch, places):
                fetched.append(answer)
                progress.advance(1)
        now_unix_nano = NEVER_NS if self._options.of_any_time else self._clock.unix_nano()
        read = [
            each if each.path is None else examine(each, each.path, self._config, now_unix_nano) for each in fetched
        ]
        examined = [each for each in read if isinstance(each, Examined)]
        chosen, refused = choose(examined)
        refused += [each for each in read if isinstance(each, Fetched)]
        for each in chosen:
            if each.anonymous:
                self._note(
                    f"{each.fetched.place.name}: an earlier version saved it without its engines,"
                    " so it is not known whether it counts twice"
                )
        sources = [_taken(each) for each in chosen] + [_left_out(each) for each in refused]
        sources.sort(key=lambda source: source.name)
        return self._publish(chosen, sources)

    def _publish(self, chosen: list[Examined], sources: list[FleetSource]) -> Pulled:
        # an older state of an engine that answered under another name is no source that is missing
        missing = sum(source.outcome not in (PullOutcome.MERGED, PullOutcome.SAME_ENGINE) for source in sources)
        share = 1.0 - missing / max(len(sources), 1)
        if not chosen or share < self._options.require:
            return Pulled(
                sources, self._snapshot, f"{missing} of {len(sources)} sources gave no state: nothing written"
            )
        digests = [each.digest for each in chosen]
        if digests == self._written and (self._options.out / SNAPSHOT_NAME).exists():
            return Pulled(sources, self._snapshot)
        try:
            bank = add(chosen, self._config)
            snapshot = self._write(bank, chosen)
        except (OSError, StateError) as error:
            text = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return Pulled(sources, self._snapshot, f"nothing written: {text}")
        self._written, self._snapshot = digests, snapshot
        return Pulled(sources, snapshot)

    def _write(self, bank: Bank, chosen: Sequence[Examined]) -> Snapshot:
        out = self._options.out
        engines = {
            (config_id, engine): known
            for each in chosen
            for config_id, known in each.facts.items()
            for engine in (each.lineages[config_id].engines if config_id in each.lineages else ())
        }
        pooled = by_model_and_gpu(bank, self._config, self._note)
        generation = published_generation(out / SNAPSHOT_NAME) + 1
        _write_bank(out / ALL_NAME, pooled, fleet_snapshot(pooled, generation))
        snapshot = fleet_snapshot(bank, generation, engines)
        _write_bank(out, bank, snapshot)
        return snapshot


def pull_once(options: PullOptions, config: Config, clock: Clock, *, say: PrintLine, note: PrintLine) -> int:
    """One round; failed if nothing was written."""
    puller = Puller(options, config, clock, note)
    puller.start()
    try:
        pulled = puller.pull(is_shown=True)
    finally:
        puller.stop()
    for line in report(pulled):
        say(line)
    for line in complaints(pulled):
        note(line)
    if pulled.problem:
        note(f"error: {pulled.problem}")
        return EXIT_FAILED
    say(f"snapshot: {options.out / SNAPSHOT_NAME}")
    return EXIT_OK


def _say_nothing(text: str) -> None:
    del text


def token_reader(path: Path | None) -> Callable[[], str]:
    """Reads the first token of a file before each use, so that a new one takes effect."""
    if path is None:
        return str

    def read() -> str:
        return next(iter(path.read_text("ascii").split()), "")

    try:
        read()
    except (OSError, ValueError) as error:
        raise StartError(f"cannot read the token in {path}: {error}") from None
    return read


def report(pulled: Pulled) -> list[str]:
    """The configurations, and how many sources they are from."""
    counts = {outcome: sum(s.outcome == outcome for s in pulled.sources) for outcome in PullOutcome}
    lines = [f"{len(pulled.sources)} sources: " + ", ".join(f"{n} {o}" for o, n in counts.items() if n)]
    for each in pulled.snapshot.configs if pulled.snapshot and not pulled.problem else ():
        step = each.targets.get("step_time")
        rows = step.models[step.champion].rows if step is not None and step.champion in step.models else 0
        replicas = len(step.replicas) if step is not None else 0
        model = each.config.get("model", "unknown model")
        lines.append(f"{each.config_id}  {model}: {rows:,} step rows" + (f", {replicas} engines" if replicas else ""))
    return lines


def complaints(pulled: Pulled) -> list[str]:
    """Sources that are not in it, and replicas that differ."""
    left_out = [source for source in pulled.sources if source.outcome != PullOutcome.MERGED]
    lines = [f"{source.name}: {source.outcome}: {source.detail}" for source in left_out[:_SOURCES_NAMED]]
    if len(left_out) > _SOURCES_NAMED:
        lines.append(f"and {len(left_out) - _SOURCES_NAMED} more sources")
    for each in pulled.snapshot.configs if pulled.snapshot else ():
        for name, learned in each.targets.items():
            lines += [f"warning: {each.config_id} {name}: {line}" for line in differing(learned)]
        if each.told_apart_by:
            lines.append(f"warning: {each.config_id}: would be told apart by {', '.join(each.told_apart_by)}")
    return lines


def _write_bank(directory: Path, bank: Bank, snapshot: Snapshot) -> None:
    for each in snapshot.configs:
        state = alone(bank, each.config_id).state()
        write_atomically(directory / STATES_NAME / f"{each.config_id}.bin", state)
    errors = write_snapshot(directory, snapshot).errors
    if errors:
        raise OSError(f"{errors[0][0]}: {errors[0][1]}")


def _taken(each: Examined) -> FleetSource:
    place = each.fetched.place
    return FleetSource(place.name, PullOutcome.MERGED, "", tuple(each.engines), each.rows, each.last_ns)


def _left_out(each: Fetched) -> FleetSource:
    return FleetSource(each.place.name, each.outcome, each.detail)
