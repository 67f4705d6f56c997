"""A recording as an evaluation sees it: the rows of each configuration, and requests with their stamps.

Rows are those of a replay of the whole recording. What ended by the cut, a share of the recording's event time, may be
learned, and what ended later is scored. KV events in the folder of a recording are of the same servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collector.config import Config
from collector.decode import MISSING, Export, Finish, SpanEventKind, Telemetry, decode_exports
from collector.decode.kv import KvBatch
from collector.identity import Fact
from collector.join import ConfigKeyChanged, Event, Joiner, Rows, SpanWindow
from collector.recordings import Timed, by_kind, in_batches
from collector.service import TAKE_BYTES, make_pipeline
from collector.telemetry import Counts
from online import RowBlock, Target

_COLUMNS = ("engine", "prompt_tokens", "output_tokens", "arrived_ns", "departed_ns")
_STAMPS = {
    SpanEventKind.QUEUED: "queued_ns",
    SpanEventKind.SCHEDULED: "scheduled_ns",
    SpanEventKind.FIRST_TOKEN: "first_token_ns",
    SpanEventKind.FINISHED: "finished_ns",
}
REQUEST = np.dtype([(name, np.int64) for name in (*_COLUMNS, *_STAMPS.values())])
"""One request that ended by itself; times in wall clock ns, 0 where nobody saw it."""


@dataclass(slots=True)
class Capture:
    """One configuration of one recording."""

    name: str
    facts: dict[str, Fact]
    telemetry: str
    rows: dict[Target, RowBlock]
    requests: NDArray[Any]
    """Of ``REQUEST``, (k,)."""
    cut_ns: int

    def all_rows(self, target: Target) -> RowBlock:
        """Every row of a target."""
        return self.rows.get(target, RowBlock.empty(target.vocabulary))

    def learned(self, target: Target) -> RowBlock:
        """Rows that ended by the cut."""
        rows = self.all_rows(target)
        return rows.take(rows.end_ns <= self.cut_ns)

    def scored(self, target: Target) -> RowBlock:
        """Rows that ended after it."""
        rows = self.all_rows(target)
        return rows.take(rows.end_ns > self.cut_ns)


def load(path: Path, entries: Sequence[Timed], config: Config, learn_until: float) -> list[Capture]:
    """The configurations of one source, cut at ``learn_until`` of its time; ``path`` is of its first recording."""
    entries = sorted(entries, key=attrgetter("unix_nano"))
    times = [timed.unix_nano for timed in entries if not isinstance(timed.item, KvBatch)]
    if not times:
        return []
    pipeline = make_pipeline(msgspec.structs.replace(config, learners=("rls",), feature_sets=()))
    rows_of: dict[str, dict[Target, list[RowBlock]]] = defaultdict(lambda: defaultdict(list))

    def keep(event: Event) -> None:
        match event:
            case ConfigKeyChanged(old, new):
                for target, blocks in rows_of.pop(old, {}).items():
                    rows_of[new][target][:0] = blocks
            case Rows(config_id, target, rows):
                rows_of[config_id][target].append(rows)

    pipeline.on_event = keep
    for batch in in_batches(entries, TAKE_BYTES):
        pipeline.process(**by_kind(batch))
    pipeline.flush()
    learned = [known for known in pipeline.snapshot(0, 1).configs if known.config_id in rows_of]
    return [
        Capture(
            name=f"{path}/{known.config_id[:6]}" if len(learned) > 1 else str(path),
            facts=known.config,
            telemetry=known.telemetry,
            rows={target: RowBlock.concatenate(blocks) for target, blocks in rows_of[known.config_id].items()},
            requests=_requests(entries, {engine.instance for engine in known.engines}, config, pipeline.joiner),
            cut_ns=times[0] + int(learn_until * (times[-1] - times[0])),
        )
        for known in learned
    ]


def _requests(entries: Sequence[Timed], instances: set[str], config: Config, joiner: Joiner) -> NDArray[Any]:
    """Requests of these engines whose journey is known from beginning to end."""
    exports = [timed.item for timed in entries if isinstance(timed.item, Export)]
    telemetry = [*decode_exports(exports, SpanWindow(config.engines_max).accept, Counts())]
    found = _journeys(telemetry, instances, joiner)
    return np.array([tuple(each.get(name, 0) for name in REQUEST.fields or ()) for each in found], REQUEST)


def _journeys(parts: Sequence[Telemetry], instances: set[str], joiner: Joiner) -> Iterator[dict[str, int]]:
    apis = {span.span_id: span for telemetry in parts for span in telemetry.api}
    for telemetry in parts:
        engine = joiner.engine_of(telemetry.instance, telemetry.recording)
        if engine is None or engine.instance not in instances:
            continue
        for span in telemetry.core:
            first = {mark.kind: mark.ts_ns for mark in reversed(span.events)}
            if span.finish not in (Finish.STOPPED, Finish.LENGTH) or not first.keys() >= _STAMPS.keys():
                continue
            stamps = {name: first[kind] for kind, name in _STAMPS.items()}
            api = apis.get(span.parent_span_id)
            if api is not None and api.samples == 1:
                stamps |= {"arrived_ns": api.arrived_ns, "departed_ns": api.departed_ns}
            yield {
                **{name: ns + span.unix_minus_mono_ns for name, ns in stamps.items() if ns != MISSING},
                "prompt_tokens": span.prompt_tokens,
                "output_tokens": span.events[-1].output_tokens,
                "engine": engine.number,
            }
