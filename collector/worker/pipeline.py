"""Decode, join, learn: what the worker does with what was admitted. Single-threaded; never raises on bad input."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from collector.config import Config
from collector.decode import PIECE_BYTES, Decoder, pieces
from collector.decode.kv import KvBatch
from collector.durable import Context, LayoutError
from collector.durable import image as state_image
from collector.durable import state as states
from collector.identity import Fact, Knowledge, cannot_derive
from collector.join import ApiProcess, Engine, Joined, Joiner, SpanWindow
from collector.join.requests import with_handoffs
from collector.receive import Export, count_spans
from collector.telemetry import Counts, Outcome, Skip, table
from online import (
    Bank,
    ConfigSnapshot,
    EngineSnapshot,
    Lane,
    Quality,
    Snapshot,
    Target,
    TargetSnapshot,
)

from .quarantine import Quarantine
from .traces import TraceLog, Traces

_log = logging.getLogger(__name__)


class Pipeline:
    """Exports in, coefficients out."""

    def __init__(self, config: Config, version: str, knowledge: Knowledge | None = None) -> None:
        dedupe = config.dedupe
        self._spans = SpanWindow(int(dedupe.window_s * 1e9), dedupe.ids_max, dedupe.emitters_max)
        self._decoder = Decoder()
        self._joiner = Joiner(config.join, knowledge)
        self._described: dict[str, tuple[tuple[str, int], ...]] = {}
        self._bank = Bank(config)
        self._quarantine = Quarantine(self._bank)
        self._version = version
        self._counts = Counts()
        self._evictions = 0
        self._traces = TraceLog()
        self.exemplars: Traces = {}
        """Traces behind the drifts of the newest snapshot; replaced, never edited."""
        self._announced: dict[str, Quality] = {}
        self._context = Context(config.join, self._joiner.knowledge)
        self.applied_seq = 0
        """Number of the last journal entry that has been processed."""

    @property
    def learned_rows(self) -> int:
        """Rows learned so far; more of them make a new generation due."""
        return self._bank.learned_rows

    @property
    def joiner(self) -> Joiner:
        """What is held between decoding and learning, for gauges."""
        return self._joiner

    def process(self, exports: Sequence[Export]) -> None:
        """Decode, join and learn; what cannot be used is counted."""
        # Even if an error of ours ends this batch: replaying what cannot be processed would fail again, for ever.
        self.applied_seq = max(self.applied_seq, max((export.seq for export in exports), default=0))
        for some in _batches(exports):
            self._process(some)

    def _process(self, exports: Sequence[Export]) -> None:
        counts = self._counts
        decoded = self._decoder.decode([(e.payload, e.peer) for e in exports], self._spans.admit, counts)
        for export, resources in zip(exports, decoded, strict=True):
            if resources is None:  # admission has parsed the envelope only
                spans = _spans(export)
                counts[table.DECODED_SPANS] += spans
                counts[table.SKIPPED_SPANS, Skip.INCONSISTENT] += spans
                continue
            for telemetry in resources:
                self._traces.see(telemetry.instance, telemetry.traces)
                self._joiner.add(telemetry, export.recording)
        self._learn(self._joiner.drain())

    def process_kv(self, batches: Sequence[KvBatch]) -> None:
        """Take KV events; the steps they tell of learn from them at the next export or flush."""
        for batch in batches:
            self._joiner.kv.add(batch)

    def flush(self) -> None:
        """End of a replay: everything held becomes rows, or is dropped for a reason."""
        self._learn(self._joiner.drain(flush=True))

    def flushed(self) -> Pipeline:
        """A copy in which everything held has become rows; this one stays as it is."""
        out = copy.deepcopy(self)
        out.flush()
        return out

    def state(self) -> bytes:
        """What was learned, for a state file."""
        return self._bank.state()

    def add_donors(self, data: bytes) -> int:
        """What new configurations may start from, out of a state file; StateError if it is none."""
        return self._bank.add_donors(data)

    def whole_state(self, generation: int = 0) -> bytes:
        """Everything a restart needs, as it stands: nothing is flushed."""
        return state_image.encode(
            state_image.StateImage(
                seq=self.applied_seq,
                generation=generation,
                spans=states.dump_spans(self._spans),
                joiner=states.dump_joiner(self._joiner),
                described=self._described,
                bank=self._bank.state(),
            )
        )

    def restore(self, image: state_image.StateImage) -> list[str]:
        """Continue from a state; names of models in it that are not configured, which are left out.

        Raises:
            StateError: it does not fit; the pipeline is as it was before.
        """
        held = None
        try:
            held = states.load_joiner(image.joiner, self._context), states.load_spans(image.spans)
        except LayoutError as error:
            _log.warning("of another version's state only what was learned is continued: %s", error)
        left_out = self._bank.restore(image.bank)
        if held is not None:
            self._joiner = held[0]
            self._spans.take_over(held[1])
            # the bank saves what has learned; of the others it has to be told again
            known = set(self._bank.configs())
            self._described = {k: v for k, v in image.described.items() if k in known}
        self.applied_seq = image.seq
        return left_out

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counts()
        events, drops = self._joiner.take_events()
        for event, number in events.items():
            counts[table.JOIN_EVENTS, event] += number
        for drop, number in drops.items():
            counts[table.DROPPED_ROWS, drop] += number
        counts.merge(self._joiner.kv.take_counts())
        counts[table.QUARANTINES] += self._quarantine.take_new()
        counts[table.QUARANTINED] = len(self._quarantine)
        counts[table.EVICTIONS] += self._bank.evictions - self._evictions
        self._evictions = self._bank.evictions
        return counts

    def _learn(self, joined: Sequence[Joined]) -> None:
        for old, new in self._joiner.renamed:
            self._bank.rename(old, new)
            self._quarantine.rename(old, new)
        self._joiner.renamed.clear()
        self._describe()
        for config_id, target, rows, lane in joined:
            outcomes = self._quarantine.learn(config_id, target, rows, lane)
            if lane is Lane.PUBLISHED:
                for outcome, count in outcomes.items():
                    self._counts[table.ROWS, target, outcome] += count
        for old, new in self._joiner.succeeded:  # the last rows of what it was are learned by now
            self._bank.inherit(new, old)
        self._joiner.succeeded.clear()

    def _describe(self) -> None:
        """Tell the bank what is known of its configurations, when that has changed: more feature sets may apply."""
        if not self._joiner.facts_changed:
            return
        self._joiner.facts_changed = False
        for config_id in self._joiner.config_ids():
            engines = self._joiner.engines_of(config_id)
            version = tuple((e.instance, e.facts.version) for e in engines)
            if self._described.get(config_id) != version:
                self._described[config_id] = version
                self._bank.describe(config_id, _facts(engines))
        if len(self._quarantine):
            self._quarantine.keep(self._joiner.config_ids())
        if len(self._described) > len(self._joiner.config_ids()):
            known = set(self._joiner.config_ids())
            self._described = {k: v for k, v in self._described.items() if k in known}
            self._announced = {k: v for k, v in self._announced.items() if k in known}

    def snapshot(self, now_unix_nano: int, generation: int) -> Snapshot:
        """What is known now; the state stays as it is."""
        configs = [self._config(config_id) for config_id in self._joiner.config_ids()]
        self.exemplars = self._traces.exemplars(configs)
        return Snapshot(
            generation=generation,
            created_unix_nano=now_unix_nano,
            tracefit_version=self._version,
            configs=configs,
        )

    def _config(self, config_id: str) -> ConfigSnapshot:
        engines = self._joiner.engines_of(config_id)
        facts = _facts(engines)
        sources: dict[str, str] = {}
        contradictions: dict[str, str] = {}
        for engine in engines:
            sources |= engine.facts.sources()
            contradictions |= engine.facts.contradictions()
        quality = min((engine.quality for engine in engines), default=Quality.REQUESTS)
        if self._announced.get(config_id) is not quality:
            self._announced[config_id] = quality
            _log.info("telemetry quality of %s: %s", config_id, quality.label)
        return ConfigSnapshot(
            config_id=config_id,
            config=facts,
            sources=sources,
            contradictions=contradictions,
            cannot_derive=list(cannot_derive(facts)),
            engines=[
                EngineSnapshot(instance=e.instance, scheduling=e.scheduling.value, last_step=e.last_step)
                for e in engines
            ],
            telemetry=quality.label,
            targets=self._targets(config_id, engines, quality, facts),
            quarantined=self._quarantine.reason(config_id),
        )

    def _targets(
        self, config_id: str, engines: Sequence[Engine | ApiProcess], quality: Quality, facts: Mapping[str, Fact]
    ) -> dict[str, TargetSnapshot]:
        targets = self._quarantine.targets(config_id)
        api = with_handoffs(targets.pop(Target.API_QUEUEING.value, None), (e.api_queueing for e in engines))
        if api is not None:
            targets[Target.API_QUEUEING.value] = api
        step = targets.get(Target.STEP_TIME.value)
        if step is not None and quality is Quality.REQUESTS and facts.get("enable_prefix_caching") is not False:
            targets[Target.STEP_TIME.value] = with_unseen_prefix_hits(step)
        return dict(sorted(targets.items()))


def _batches(exports: Sequence[Export]) -> Iterator[Sequence[Export]]:
    """What is decoded at once: small exports together, of a large one a piece at a time, because it takes memory.

    Where rows are cut depends on the telemetry, not on such pieces.
    """
    together: list[Export] = []
    for export in exports:
        if len(export.payload) <= PIECE_BYTES:
            together.append(export)
            continue
        if together:
            yield together
            together = []
        for piece in pieces(export.payload):
            yield [export if piece is export.payload else export._replace(payload=piece, spans=0)]
    if together:
        yield together


def _spans(export: Export) -> int:
    """Spans of an export that nobody could read, or of a piece of one."""
    spans = count_spans(export.payload)
    return export.spans if isinstance(spans, Outcome) else spans


def with_unseen_prefix_hits(target: TargetSnapshot) -> TargetSnapshot:
    """Request spans do not tell prefix-cache hits: what is learned of prefill tokens is weak at best."""
    models = {}
    for name, model in target.models.items():
        features = [
            msgspec.structs.replace(feature, status="weak")
            if feature.name == "prefill_tokens" and feature.status == "identified"
            else feature
            for feature in model.features
        ]
        models[name] = msgspec.structs.replace(model, features=features)
    return msgspec.structs.replace(target, models=models)


def _facts(engines: Sequence[Engine | ApiProcess]) -> dict[str, Fact]:
    """What the engines of one configuration know together."""
    facts: dict[str, Fact] = {}
    for engine in engines:
        facts |= engine.facts.known() | engine.facts.identity(engine.instance, engine.recording)
    return facts
