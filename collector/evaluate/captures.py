"""A recording as an evaluation sees it: rows per engine, requests with their stamps, and when each was delivered.

What a sidecar could have known at a time is what had been delivered by then, so the cut between learning and scoring is
made in delivery time: the receive time of an export where an index lies beside the recording (``X.idx.jsonl.gz`` beside
``X.pb.gz``, one ``recv_unix_ns`` a line), else the newest span end so far. Learning rows come from a join that was fed
nothing later; scored rows from one that was fed everything. KV events in the folder of a recording are of the same
servers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from collector.config import Config
from collector.decode import MISSING, Finish, MarkKind, Telemetry
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.identity import Fact, Knowledge, cannot_derive
from collector.ingest import Export
from collector.join import Event, Joiner, Renamed, Rows, Scheduling
from collector.recordings import Received, Recording, Timed, index_of, lines_of, merged
from collector.runtime import PrintLine
from collector.service import Correlator
from collector.telemetry import Counts, table
from online import ConfigSnapshot, Ints, RowBlock, Snapshot, Target


def with_kv_beside(sources: Sequence[list[Recording]], note: PrintLine) -> list[list[Recording]]:
    """Sources of telemetry, each with the recordings of KV events from its folder.

    ``note`` is told of events that have no telemetry beside them.
    """
    kept, kv = [], dict[Path, list[Path]]()
    for recordings in sources:
        # Whoever reads the recording whole says what is wrong with it.
        with contextlib.closing(iter(Recording(recordings[0].path, lambda _: None))) as timed:
            first = next(timed, None)
        if first is not None and isinstance(first.said, KvBatch):
            kv.setdefault(recordings[0].path.parent, []).extend(recording.path for recording in recordings)
        else:
            kept.append(recordings)
    for folder in sorted(kv.keys() - {recordings[0].path.parent for recordings in kept}):
        note(f"{folder}: KV events without telemetry in the same folder are left out")
    return [
        recordings + [Recording(path, note) for path in kv.get(recordings[0].path.parent, ())] for recordings in kept
    ]


Learn = Callable[[Sequence[Timed]], Snapshot]
"""What a sidecar publishes that was fed this telemetry, and nothing else."""
PASSES = 256
"""Forward passes that are joined at once: each is a row by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that ended by itself; times in wall clock ns, ``delivered`` of its span, None where nobody saw it."""

    prompt_tokens: int
    output_tokens: int
    first_token_ns: int
    finished_ns: int
    delivered_ns: int
    engine: int = 0
    arrived_ns: int | None = None
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    departed_ns: int | None = None

    @property
    def begun_ns(self) -> int:
        """When it arrived, as far as that was seen."""
        return next(each for each in (self.arrived_ns, self.queued_ns, self.first_token_ns) if each is not None)


@dataclass(slots=True)
class Delivered:
    """Rows of one target of one configuration, and when each row's own step was delivered."""

    rows: RowBlock
    delivered_ns: Ints
    step_id: Ints
    """Of the row's own (first) step; 0 where there are no summaries."""


@dataclass(slots=True)
class Capture:
    """One configuration of one recording."""

    name: str
    config_id: str
    facts: dict[str, Fact]
    telemetry: str
    full: dict[Target, Delivered]
    learned: dict[Target, RowBlock]
    requests: list[Request]
    cut_ns: int
    cannot_derive: tuple[str, ...] = ()
    dropped_rows: dict[str, int] = field(default_factory=dict)
    truth_us: dict[int, float] = field(default_factory=dict)
    served: list[Request] = field(default_factory=list)
    """``requests``, or those of an engine that tells no more than when they arrived and ended."""
    end_ns: int = 0
    """When the last export was delivered."""
    published: ConfigSnapshot | None = None
    """What was known at the cut."""

    def scored(self, target: Target) -> RowBlock:
        """Rows delivered after the cut; a step whose true time lies beside the recording has that time."""
        full = self.full.get(target)
        if full is None:
            return RowBlock.empty(target.vocabulary)
        after = np.flatnonzero(full.delivered_ns > self.cut_ns)
        rows = full.rows.take(after)
        if target is Target.STEP_TIME and self.truth_us:
            rows.elapsed_us[:] = [
                self.truth_us.get(int(step), wire)
                for step, wire in zip(full.step_id[after], rows.elapsed_us, strict=True)
            ]
        return rows


@dataclass(slots=True)
class _Stream:
    """One pass over a recording: what its join gave, and the telemetry with the time of its delivery."""

    joiner: Joiner
    told: list[tuple[Telemetry, int]] = field(default_factory=list)
    rows: dict[tuple[str, Target], list[RowBlock]] = field(default_factory=dict)

    def apply(self, events: Iterable[Event]) -> None:
        """Keep published rows by configuration; nothing is learned, so nobody has to be described or succeeded."""
        for event in events:
            match event:
                case Renamed(old, new):
                    for config_id, target in [key for key in self.rows if key[0] == old]:
                        self.rows.setdefault((new, target), [])[:0] = self.rows.pop((config_id, target))
                case Rows(config_id, target, rows):
                    self.rows.setdefault((config_id, target), []).append(rows)

    def instances_of(self, config_id: str) -> set[str]:
        """The emitters of a configuration."""
        return {emitter.instance for emitter in self.joiner.emitters_of(config_id)}

    def of(self, config_id: str) -> dict[Target, RowBlock]:
        """The rows of a configuration."""
        return {target: RowBlock.concatenate(blocks) for (key, target), blocks in self.rows.items() if key == config_id}


def load(
    recordings: Sequence[Recording],
    knowledge: Knowledge,
    join: Config,
    learn_until: float,
    learn: Learn | None = None,
) -> list[Capture]:
    """The configurations of one source's recordings, cut at ``learn_until`` of its delivery time.

    With ``learn`` each has what was published of it at the cut. KV events are taken to have been heard when they
    happened.
    """
    path, label = recordings[0].path, recordings[0].label
    said = [timed for timed in merged(recordings) if not isinstance(timed.said, ScrapedPage)]
    told, kv = ([each for each in said if isinstance(each.said, KvBatch) is is_kv] for is_kv in (False, True))
    if not told:
        return []
    times = [timed.unix_nano for timed in told]
    received = lines_of(index_of(path), Received)
    if len(received) == len(told):
        times = [each.recv_unix_ns for each in received]
    cut_ns = min(times) + int(learn_until * (max(times) - min(times)))
    delivered = [(each.unix_nano, each) for each in kv] + list(zip(times, told, strict=True))
    delivered.sort(key=lambda item: item[0])
    early = [item for item in delivered if item[0] <= cut_ns]
    everything = before = _run(delivered, knowledge, join)
    if len(early) < len(delivered):
        before = _run(early, knowledge, join)
    published = learn([timed for _, timed in early]).configs if learn is not None else []
    captures = _captures(path, label, everything, before, cut_ns)
    for capture in captures:
        capture.end_ns = max(times)
        instances = everything.instances_of(capture.config_id)
        heard_of = [each for each in published if {engine.instance for engine in each.engines} & instances]
        capture.published = heard_of[-1] if heard_of else None
    return captures


class _TrueStep(msgspec.Struct):
    step: int
    start_mono_ns: int
    end_mono_ns: int


def _run(delivered: Sequence[tuple[int, Timed]], knowledge: Knowledge, join: Config) -> _Stream:
    correlator, counts = Correlator(join, knowledge), Counts()
    stream, passes = _Stream(correlator.joiner), 0
    for at_ns, timed in delivered:
        match timed.said:
            case Export():
                found = list[Telemetry]()
                stream.apply(correlator.process([timed.said], counts, found.append))
                stream.told += [(telemetry, at_ns) for telemetry in found]
            case KvBatch():
                stream.joiner.kv.add(timed.said)
            case ForwardPass():
                stream.joiner.add_pass(timed.said)
                passes += 1
                if passes % PASSES == 0:
                    stream.apply(stream.joiner.drain())
    stream.apply(stream.joiner.drain(flush=True))
    return stream


def _captures(path: Path, label: str, everything: _Stream, before: _Stream, cut_ns: int) -> list[Capture]:
    name = path.parent.name if path.name.startswith("otlp.") else path.name.split(".")[0]
    summaries = [
        (int(unix_ns), delivered_ns, int(step_id))
        for telemetry, delivered_ns in everything.told
        for unix_ns, step_id in zip(telemetry.steps["unix_ns"], telemetry.steps["step_id"], strict=True)
    ]
    unix = np.array(sorted(summaries), np.int64).reshape(-1, 3)
    joiner = everything.joiner
    drops = joiner.take_counts().by_label(table.DROPPED_ROWS)
    captures = []
    config_ids = sorted({config_id for config_id, _ in everything.rows})
    for config_id in config_ids:
        emitters = joiner.emitters_of(config_id)
        facts: dict[str, Fact] = {}
        for emitter in emitters:
            facts |= emitter.facts.known()
        instances = everything.instances_of(config_id)
        behind = any(emitter.snapshot().scheduling == Scheduling.ASYNC for emitter in emitters)
        requests = sorted(_journeys(everything, label, instances), key=lambda request: request.finished_ns)
        captures.append(
            Capture(
                name=name if len(config_ids) == 1 else f"{name}/{config_id[:6]}",
                config_id=config_id,
                facts=facts,
                telemetry=min(emitter.quality for emitter in emitters).label,
                full={target: _deliver(rows, unix, behind=behind) for target, rows in everything.of(config_id).items()},
                learned=before.of(_same_config(before, instances, config_id)),
                requests=requests,
                served=requests or list(_answers(everything, instances)),
                cut_ns=cut_ns,
                cannot_derive=cannot_derive(facts),
                truth_us=_truth(path.with_name("truth.jsonl.gz")),
                dropped_rows={reason: int(rows) for reason, rows in sorted(drops.items())},
            )
        )
    return captures


def _truth(path: Path) -> dict[int, float]:
    """True step times, where who recorded knew them: start to start of consecutive steps, as the steps' time is."""
    steps = {each.step: each for each in lines_of(path, _TrueStep)}
    starts = {step - 1: each.start_mono_ns for step, each in steps.items()}
    return {step: (starts.get(step, each.end_mono_ns) - each.start_mono_ns) / 1e3 for step, each in steps.items()}


def _same_config(before: _Stream, instances: set[str], config_id: str) -> str:
    """The configuration of the same emitters in the earlier part: facts learned later may have renamed it since."""
    same = (each for each in before.joiner.config_ids() if before.instances_of(each) & instances)
    return next(same, config_id)


def _deliver(rows: RowBlock, unix: Ints, *, behind: bool) -> Delivered:
    """When the summary of each row's own step was delivered; without summaries, when the row was over.

    ``behind``: asynchronous, the row of step n begins with the summary of n + 1.
    """
    start_ns = rows.end_ns - (rows.elapsed_us * 1e3).astype(np.int64)
    if len(unix) == 0:
        return Delivered(rows, rows.end_ns, np.zeros(len(rows), np.int64))
    at = np.clip(np.searchsorted(unix[:, 0], start_ns), 1, max(len(unix) - 1, 1))
    nearer = np.where(start_ns - unix[at - 1, 0] < unix[np.minimum(at, len(unix) - 1), 0] - start_ns, at - 1, at)
    nearest = unix[np.minimum(nearer, len(unix) - 1)]
    return Delivered(rows, nearest[:, 1], nearest[:, 2] - behind)


def _journeys(stream: _Stream, label: str, instances: set[str]) -> Iterator[Request]:
    """The requests whose way through the engine was told from beginning to end."""
    apis = {span.span_id: span for telemetry, _ in stream.told for span in telemetry.api}
    spans = [(told.instance, span, delivered_ns) for told, delivered_ns in stream.told for span in told.core]
    for instance, span, delivered_ns in spans:
        engine = stream.joiner.engine_of(instance, label)
        if engine is None or engine.instance not in instances or span.finish not in (Finish.STOPPED, Finish.LENGTH):
            continue
        marks: dict[MarkKind, int] = {}
        for mark in span.marks:
            marks.setdefault(mark.kind, mark.ts_ns + span.unix_minus_mono_ns)
        if not {MarkKind.QUEUED, MarkKind.SCHEDULED, MarkKind.FIRST_TOKEN, MarkKind.FINISHED} <= set(marks):
            continue
        api = apis.get(span.parent_span_id)
        arrived_ns, departed_ns = (api.arrived_ns, api.departed_ns) if api and api.samples == 1 else (MISSING, MISSING)
        yield Request(
            engine=engine.number,
            prompt_tokens=span.prompt_tokens,
            output_tokens=span.marks[-1].output_tokens,
            queued_ns=marks[MarkKind.QUEUED],
            scheduled_ns=marks[MarkKind.SCHEDULED],
            first_token_ns=marks[MarkKind.FIRST_TOKEN],
            finished_ns=marks[MarkKind.FINISHED],
            delivered_ns=delivered_ns,
            arrived_ns=None if arrived_ns == MISSING else arrived_ns + span.unix_minus_mono_ns,
            departed_ns=None if departed_ns == MISSING else departed_ns + span.unix_minus_mono_ns,
        )


def _answers(stream: _Stream, instances: set[str]) -> Iterator[Request]:
    """Those of an engine that tells no more than when they arrived and ended."""
    for telemetry, delivered_ns in stream.told:
        for span in telemetry.requests if telemetry.instance in instances else ():
            if span.decode_s >= 0.0:
                yield Request(
                    prompt_tokens=span.prompt_tokens,
                    output_tokens=span.output_tokens,
                    arrived_ns=span.arrival_unix_ns,
                    first_token_ns=span.arrival_unix_ns + int(1e9 * span.first_token_s),
                    finished_ns=span.arrival_unix_ns + int(1e9 * (span.first_token_s + span.decode_s)),
                    delivered_ns=delivered_ns,
                )
