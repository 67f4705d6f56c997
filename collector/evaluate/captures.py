"""A recording as an evaluation sees it: rows per engine, requests with their stamps, and when each was delivered.

What a sidecar could have known at a time is what had been delivered by then, so the cut between learning and scoring is
made in delivery time: the receive time of an export where an index lies beside the recording (``X.idx.jsonl.gz`` beside
``X.pb.gz``, one ``recv_unix_ns`` a line), else the newest span end so far. Learning rows come from a pipeline that was
fed nothing later; scored rows from one that was fed everything. KV events in the folder of a recording are of the same
servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collector.config import Config
from collector.decode import MISSING, Export, Finish, SpanEventKind, Telemetry, decode_exports
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.identity import Fact
from collector.join import ConfigKeyChanged, Event, Joiner, Rows, SpanWindow
from collector.recordings import Timed, by_kind, in_batches, receipts_of
from collector.service import TAKE_BYTES, make_pipeline
from collector.telemetry import Counts, table
from online import Ints, RowBlock, Target

_COLUMNS = ("engine", "prompt_tokens", "output_tokens", "arrived_ns", "departed_ns", "delivered_ns")
_STAMPS = {
    SpanEventKind.QUEUED: "queued_ns",
    SpanEventKind.SCHEDULED: "scheduled_ns",
    SpanEventKind.FIRST_TOKEN: "first_token_ns",
    SpanEventKind.FINISHED: "finished_ns",
}
REQUEST = np.dtype([(name, np.int64) for name in (*_COLUMNS, *_STAMPS.values())])
"""One request that ended by itself; times in wall clock ns, ``delivered`` of its span, 0 where nobody saw it."""


@dataclass(slots=True)
class Delivered:
    """Rows of one target of one configuration, and when each row's own step was delivered, (n,)."""

    rows: RowBlock
    delivered_ns: Ints


@dataclass(slots=True)
class Capture:
    """One configuration of one recording."""

    name: str
    config_id: str
    facts: dict[str, Fact]
    telemetry: str
    full: dict[Target, Delivered]
    learned: dict[Target, RowBlock]
    requests: NDArray[Any]
    """Of ``REQUEST``, (k,)."""
    cut_ns: int
    cannot_derive: Sequence[str] = ()
    dropped_rows: dict[str, int] = field(default_factory=dict)

    def scored(self, target: Target) -> RowBlock:
        """Rows delivered after the cut."""
        full = self.full.get(target)
        if full is None:
            return RowBlock.empty(target.vocabulary)
        return full.rows.take(np.flatnonzero(full.delivered_ns > self.cut_ns))


class _Replay:
    """A pipeline after a part of a recording, and the rows that it made, by configuration and target."""

    def __init__(self, config: Config, delivered: Sequence[tuple[int, Timed]]) -> None:
        self.rows: dict[tuple[str, Target], list[RowBlock]] = {}
        self.pipeline = make_pipeline(msgspec.structs.replace(config, learners=("rls",), feature_sets=()))
        self.pipeline.on_event = self._keep
        for batch in in_batches((timed for _, timed in delivered), TAKE_BYTES):
            self.pipeline.process(**by_kind(batch))
        self.pipeline.flush()

    def _keep(self, event: Event) -> None:
        match event:
            case ConfigKeyChanged(old, new):
                for config_id, target in [key for key in self.rows if key[0] == old]:
                    self.rows.setdefault((new, target), [])[:0] = self.rows.pop((config_id, target))
            case Rows(config_id, target, rows):
                self.rows.setdefault((config_id, target), []).append(rows)

    def of(self, config_id: str) -> dict[Target, RowBlock]:
        """The rows of a configuration."""
        return {target: RowBlock.concatenate(blocks) for (key, target), blocks in self.rows.items() if key == config_id}


def load(path: Path, said: Sequence[Timed], config: Config, learn_until: float) -> list[Capture]:
    """The configurations of one source, cut at ``learn_until`` of its delivery time; empty if it holds pages.

    ``path`` is of its first recording. KV events count as delivered when they happened.
    """
    delivered = _in_order_of_delivery(path, said)
    times = [at_ns for at_ns, timed in delivered if not isinstance(timed.said, KvBatch)]
    if not times:
        return []
    cut_ns = times[0] + int(learn_until * (times[-1] - times[0]))
    everything = before = _Replay(config, delivered)
    early = [item for item in delivered if item[0] <= cut_ns]
    if len(early) < len(delivered):
        before = _Replay(config, early)
    published = before.pipeline.snapshot(cut_ns, 1)
    deliveries = _Deliveries(delivered, config)
    drops = everything.pipeline.joiner.take_counts().by_label(table.DROPPED_ROWS)
    captures = []
    for known in everything.pipeline.snapshot(0, 1).configs:
        full, instances = everything.of(known.config_id), {engine.instance for engine in known.engines}
        if not full:
            continue
        # Facts that were learned later may have renamed it since.
        earlier = next((each for each in published.configs if instances & {e.instance for e in each.engines}), None)
        captures.append(
            Capture(
                name=name_of(path),
                config_id=known.config_id,
                facts=known.config,
                telemetry=known.telemetry,
                full={target: deliveries.delivered(rows) for target, rows in full.items()},
                learned={} if earlier is None else before.of(earlier.config_id),
                requests=deliveries.requests_of(instances, everything.pipeline.joiner),
                cut_ns=cut_ns,
                cannot_derive=known.cannot_derive,
                dropped_rows={reason: int(rows) for reason, rows in sorted(drops.items())},
            )
        )
    for capture in captures if len(captures) > 1 else ():
        capture.name += f"/{capture.config_id[:6]}"
    return captures


def name_of(path: Path) -> str:
    """What a recording is called: its folder, where its file has the name of any."""
    return path.parent.name if path.name.startswith(("otlp.", "pages.")) else path.name.split(".")[0]


def _in_order_of_delivery(path: Path, said: Sequence[Timed]) -> list[tuple[int, Timed]]:
    """With the time of each."""
    exports = [timed for timed in said if isinstance(timed.said, Export | ForwardPass)]
    times = [each.recv_unix_ns for each in receipts_of(path)]
    if len(times) != len(exports):
        times = [timed.unix_nano for timed in exports]
    kv = ((timed.unix_nano, timed) for timed in said if isinstance(timed.said, KvBatch))
    return sorted([*kv, *zip(times, exports, strict=True)], key=itemgetter(0))


class _Deliveries:
    """The telemetry itself, with the time of its delivery."""

    def __init__(self, delivered: Sequence[tuple[int, Timed]], config: Config) -> None:
        spans = SpanWindow(config.engines_max)
        self._parts: list[tuple[Telemetry, int]] = [
            (telemetry, at_ns)
            for at_ns, timed in delivered
            if isinstance(timed.said, Export)
            for telemetry in decode_exports([timed.said], spans.admit, Counts())
        ]
        summaries = [
            (int(unix_ns), at_ns) for telemetry, at_ns in self._parts for unix_ns in telemetry.steps["unix_ns"]
        ]
        self._summaries: Ints = np.array(sorted(summaries), np.int64).reshape(-1, 2)

    def delivered(self, rows: RowBlock) -> Delivered:
        """When the summary that each row begins with was delivered; without summaries, when the row was over."""
        if not len(self._summaries):
            return Delivered(rows, rows.end_ns)
        start_ns, (unix_ns, at_ns) = rows.end_ns - (rows.elapsed_us * 1e3).astype(np.int64), self._summaries.T
        return Delivered(rows, at_ns[np.searchsorted((unix_ns[1:] + unix_ns[:-1]) // 2, start_ns)])

    def requests_of(self, instances: set[str], joiner: Joiner) -> NDArray[Any]:
        """Those whose journey is known from beginning to end."""
        found = self._journeys(instances, joiner)
        return np.array([tuple(each.get(name, 0) for name in REQUEST.fields or ()) for each in found], REQUEST)

    def _journeys(self, instances: set[str], joiner: Joiner) -> Iterator[dict[str, int]]:
        apis = {span.span_id: span for telemetry, _ in self._parts for span in telemetry.api}
        for telemetry, at_ns in self._parts:
            engine = joiner.engine_of(telemetry.instance, telemetry.recording)
            if engine is None or engine.instance not in instances:
                continue
            for span in telemetry.core:
                first = {mark.kind: mark.ts_ns for mark in reversed(span.marks)}
                if span.finish not in (Finish.STOPPED, Finish.LENGTH) or not first.keys() >= _STAMPS.keys():
                    continue
                stamps = {name: first[kind] for kind, name in _STAMPS.items()}
                api = apis.get(span.parent_span_id)
                if api is not None and api.samples == 1:
                    stamps |= {"arrived_ns": api.arrived_ns, "departed_ns": api.departed_ns}
                yield {
                    **{name: ns + span.unix_minus_mono_ns for name, ns in stamps.items() if ns != MISSING},
                    "prompt_tokens": span.prompt_tokens,
                    "output_tokens": span.marks[-1].output_tokens,
                    "engine": engine.number,
                    "delivered_ns": at_ns,
                }
