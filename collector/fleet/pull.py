"""States of a fleet merged: ``tracefit lab merge`` of files, and one round of ``tracefit fleet pull``.

    OUT/snapshot.json, <config>.blis.yaml    by configuration
    OUT/states/<config>.bin                  what that is made of, for donors and further merges

Statistics are added stratum by stratum, so that the result equals one learner that saw all of it (invariant 6). Who is
taken is decided first, with memory for one state: of states that share rows the newest (online/state.py). Then
they are added in the order of event time, and of the bytes where that is equal, so that neither the order of the
sources nor who was unreachable the last time shows. The time of a snapshot is that of the newest row.

Every file is replaced as one step, states before the snapshot. A configuration that no source knows any more leaves the
snapshot; its state stays. One process writes to a directory at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

import tracefit
from collector import __version__
from collector.commands import Report
from collector.config import Config
from collector.identity import unknown_experts
from collector.recordings import check_targets
from collector.runtime import EXIT_FAILED, EXIT_OK, print_stderr, print_stdout, progress, sentence
from collector.service import STATES_NAME, Directory, check_learning
from collector.telemetry import PullOutcome
from exporters.questions import counted
from exporters.snapshot_file import SNAPSHOT_NAME, published_snapshot, write_atomically, write_snapshot
from exporters.status_page import FleetSource
from exporters.wording import STEP_TIME
from online import Bank, ConfigSnapshot, Snapshot, StateError
from online.state import STATE_BYTES_MAX, Lineage, LineageLedger, StateTooLargeError
from online.transfer import HIDES_HITS

from .sources import fetch_states, find_places, find_targets


def merge_files(paths: Sequence[Path], out: Path, config: Config, snapshot: Path | None = None) -> Report:
    """Merge state files, and those of directories, into ``out``, and write their coefficients to ``snapshot``.

    A state that is corrupt, does not fit, or has learned the same rows as a newer one is named, and nothing is written;
    nor is it where none of them has learned anything.
    """
    check_learning(config)
    check_targets(out, snapshot)
    places = [place for path in paths for place in find_places(str(path))]
    chosen, left_out = choose(
        [each if isinstance(each, FleetSource) else examine(each.name, Path(each.name), config) for each in places]
    )
    refused = [source for source in left_out if source.outcome is not PullOutcome.NOTHING_YET]
    if refused:
        return Report(EXIT_FAILED, notes=[f"{source.name}: {source.detail}" for source in refused])
    try:
        merged = add(chosen, config)
    except StateError as error:
        return Report(EXIT_FAILED, notes=[str(error)])
    whole = fleet_snapshot(merged)
    if not whole.configs:
        why = "nothing to merge: no row was learned in any of the states (rows that still wait are not merged)"
        return Report(EXIT_FAILED, notes=[why])
    for target, data in ((out, merged.state()), (snapshot, whole.to_json())):
        if target is not None:
            write_atomically(target, data)
    return Report(EXIT_OK, [*_held(whole), f"state: {out}"], msgspec.json.decode(whole.to_json()), _odd(whole))


_TELEMETRY = "merged"
"""Quality of telemetry of merged states, which do not record it."""


def fleet_snapshot(bank: Bank, generation: int = 1) -> Snapshot:
    """Snapshot of every configuration in a bank of merged states."""
    configs = []
    for each in sorted(bank.configs()):
        targets = bank.targets(each)
        facts, step = dict(bank.facts(each)), targets.get(STEP_TIME)
        configs.append(
            ConfigSnapshot(
                config_id=each,
                config=facts,
                engines=[],
                telemetry=_TELEMETRY,
                targets=targets,
                prefix_hits_hidden=facts.get(HIDES_HITS) is True,
                doubts=[*filter(None, [unknown_experts(facts)]), *(step.doubts if step is not None else ())],
            )
        )
    newest_unix_nano = bank.event_span_ns()[1]
    return Snapshot(
        generation=generation, created_unix_nano=newest_unix_nano, tracefit_version=__version__, configs=configs
    )


UNPACKED_BYTES, UNPACKED_RATIO = 1 << 26, 64
"""What a state that somebody else made may unpack to: so much, or so many times its size. A configuration that has
learned everything takes 1.2 MB, 17 times its size."""


class Examined(NamedTuple):
    """A readable state: its report once it is merged, and the keys by which it is chosen and ordered."""

    source: FleetSource
    path: Path
    digest: bytes
    first_ns: int
    lineages: Mapping[str, Lineage]


def examine(name: str, path: Path, config: Config) -> Examined | FleetSource:
    """Read a state, or say why it cannot be used."""
    bank = Bank(config)
    try:
        data = path.read_bytes()
        bank.restore(data, min(max(UNPACKED_BYTES, UNPACKED_RATIO * len(data)), STATE_BYTES_MAX))
    except StateError as error:
        is_large = isinstance(error, StateTooLargeError)
        return FleetSource(name, PullOutcome.TOO_LARGE if is_large else PullOutcome.UNEXPECTED, str(error))
    first_ns, last_ns = bank.event_span_ns()
    if not last_ns:
        return FleetSource(name, PullOutcome.NOTHING_YET, "nothing was learned in this state")
    engines = [each for lineage in bank.lineages.values() for each in lineage.engines.items()]
    rows = sum(number for _, spans in engines for _, _, number in spans)  # a state of a pull has no count of its own
    source = FleetSource(name, PullOutcome.MERGED, "", tuple(sorted({engine for engine, _ in engines})), rows, last_ns)
    return Examined(source, path, hashlib.blake2b(data, digest_size=16).digest(), first_ns, bank.lineages)


def choose(read: Sequence[Examined | FleetSource]) -> tuple[list[Examined], list[FleetSource]]:
    """The states that share no rows, in the order to add them; the others with the reason."""
    ledger = LineageLedger()
    taken: list[Examined] = []
    left_out = [each for each in read if isinstance(each, FleetSource)]
    examined = [each for each in read if isinstance(each, Examined)]
    newest_first = sorted(examined, key=lambda e: (-e.source.last_unix_nano, -e.source.rows, e.digest, e.source.name))
    for each in newest_first:
        name = each.source.name
        try:
            ledger.accept(name, each.lineages)
        except StateError as error:
            left_out.append(FleetSource(name, PullOutcome.SAME_ENGINE, str(error).removeprefix(f"{name}: ")))
        else:
            taken.append(each)
    return sorted(taken, key=lambda e: (e.first_ns, e.source.last_unix_nano, e.digest)), left_out


def add(chosen: Sequence[Examined], config: Config) -> Bank:
    """The sum of chosen states; StateError if two of one name have other columns."""
    merged = Bank(config)
    for each in chosen:
        part = Bank(config)
        part.restore(each.path.read_bytes())
        merged.merge(part)
    return merged


FETCHED_NAME = ".pull"
CONFIGS_MAX = 10_000


@contextlib.contextmanager
def working_directory(path: Path) -> Iterator[Path]:
    """Make an empty directory for the block, without what a killed process left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Pulled(NamedTuple):
    """Result of a round."""

    sources: list[FleetSource]
    snapshot: Snapshot | None = None
    problem: str = ""
    """Why nothing was written."""


class Puller:
    """Rounds over the same sources; one thread at a time. The fleet's files go to the directory ``out``.

    ``require`` is the share of the sources that must be merged, or nothing is written; ``token`` says before each round
    what sidecars are asked with.
    """

    def __init__(
        self,
        sources: Sequence[str],
        out: Path,
        config: Config,
        *,
        require: float = 0.5,
        token: Callable[[], str | None] = str,
    ) -> None:
        check_learning(config)
        self.out = out
        self._sources, self._require, self._token = sources, require, token
        self._config = msgspec.structs.replace(config, engines_max=CONFIGS_MAX)
        self._directory = Directory(out, "OUT")
        self._written: list[bytes] = []
        self._snapshot: Snapshot | None = None

    def start(self) -> None:
        """Take the directory; StartError if another process has it."""
        self._directory.take()
        (self.out / STATES_NAME).mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """Release the directory for another process."""
        self._directory.release()

    def pull(self) -> Pulled:
        """Ask every source, merge, write."""
        sources: list[FleetSource] = []
        try:
            with working_directory(self.out / FETCHED_NAME) as directory:
                chosen, sources = self._gather(directory)
                problem = self._publish(chosen, sources)
        except (OSError, StateError) as error:  # a volume that is full, say; or two of one name have other columns
            problem = f"nothing written: {sentence(error)}"
        return Pulled(sources, self._snapshot, problem)

    def _gather(self, directory: Path) -> tuple[list[Examined], list[FleetSource]]:
        """The states to add, in order, and what became of every source."""
        places = find_targets(self._sources)
        with progress("asked", len(places), "sources") as bar:
            fetching = fetch_states(places, directory, self._token, bar.update)
            fetched = asyncio.run(fetching)
        read = [
            examine(place.name, found, self._config) if isinstance(found, Path) else found
            for place, found in zip(places, fetched, strict=True)
        ]
        chosen, left_out = choose(read)
        return chosen, sorted([*left_out, *(each.source for each in chosen)])

    def _publish(self, chosen: list[Examined], sources: list[FleetSource]) -> str:
        """Write the sum of chosen states, if it is another one; why not."""
        # an older state of an engine that answered under another name is no source that is missing
        missing = sum(source.outcome not in (PullOutcome.MERGED, PullOutcome.SAME_ENGINE) for source in sources)
        if not chosen or missing > (1.0 - self._require) * len(sources):
            return f"{missing} of {len(sources)} sources gave no state: nothing written"
        out, digests = self.out, [each.digest for each in chosen]
        if digests == self._written and (out / SNAPSHOT_NAME).exists():
            return ""
        merged = add(chosen, self._config)
        published = published_snapshot(out / SNAPSHOT_NAME)
        snapshot = fleet_snapshot(merged, 1 if published is None else published.generation + 1)
        for config in snapshot.configs:
            write_atomically(out / STATES_NAME / f"{config.config_id}.bin", merged.state(config.config_id))
        if errors := write_snapshot(out, snapshot).errors:
            raise OSError(f"{errors[0][0]}: {errors[0][1]}")
        self._written, self._snapshot = digests, snapshot
        return ""


def pull_once(puller: Puller) -> int:
    """One round; failed if nothing was written."""
    puller.start()
    try:
        pulled = puller.pull()
    finally:
        puller.stop()
    return conclude(pulled, puller.out)


def conclude(pulled: Pulled, out: Path) -> int:
    """Say what became of a round; failed if nothing was written."""
    for line in report(pulled):
        print_stdout(line)
    for line in complaints(pulled):
        print_stderr(line)
    if pulled.problem:
        print_stderr(f"error: {pulled.problem}")
        return EXIT_FAILED
    print_stdout(f"snapshot: {out / SNAPSHOT_NAME}")
    return EXIT_OK


def report(pulled: Pulled) -> list[str]:
    """The configurations, and how many sources they are from."""
    counts = {outcome: sum(s.outcome == outcome for s in pulled.sources) for outcome in PullOutcome}
    lines = [f"{counted(len(pulled.sources), 'source')}: " + ", ".join(f"{n} {o}" for o, n in counts.items() if n)]
    return lines + (_held(pulled.snapshot) if pulled.snapshot and not pulled.problem else [])


def _held(snapshot: Snapshot) -> list[str]:
    """A line for each configuration."""
    lines = []
    for each, known in zip(snapshot.configs, tracefit.load(snapshot.to_json()).configs, strict=True):
        step = each.targets.get(STEP_TIME)
        engines = f", {len(step.replicas)} engines" if step is not None and step.replicas else ""
        lines.append(f"{each.config_id}  {known.name}: {known.verdict.rows:,} step rows{engines}")
    return lines


def complaints(pulled: Pulled) -> list[str]:
    """Sources that are not in it, and replicas that differ."""
    left_out = [source for source in pulled.sources if source.outcome != PullOutcome.MERGED]
    lines = [f"{source.name}: {source.outcome}: {source.detail}" for source in left_out]
    return lines + (_odd(pulled.snapshot) if pulled.snapshot else [])


def _odd(snapshot: Snapshot) -> list[str]:
    """Replicas that differ."""
    configs = tracefit.load(snapshot.to_json()).configs
    return [f"warning: {each.config_id} {STEP_TIME}: {odd.text}" for each in configs for odd in each.verdict.outliers]
