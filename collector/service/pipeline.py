"""Decode, join, learn: what the worker does with what was admitted. Single-threaded; never raises on bad input.

    exports ─► decode, each span once ─► join ─► events ─► the bank learns ─► snapshot

The same for live telemetry and for replays. Where rows are cut depends on the telemetry, not on how many exports are
decoded at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from collector import __version__
from collector.config import Config, ConfigError
from collector.decode import Export, Telemetry, decode_exports
from collector.decode.fpm import ForwardPass
from collector.decode.kv import KvBatch
from collector.decode.pages import ScrapedPage
from collector.identity import ConfigResolver, Fact, FactSource, unknown_experts
from collector.join import (
    ConfigKeyChanged,
    ConfigReplaced,
    ConfigUpdated,
    Emitter,
    Event,
    Joiner,
    Rows,
    SpanWindow,
    facts_of,
    quality_of,
    replaced_configs,
    with_fallbacks,
)
from collector.join.inferred import NEARLY_WHOLE, WHOLE, doubts_of
from collector.runtime import sentence
from collector.telemetry import Counts, table
from exporters.what_if import WorkloadProfile
from online import (
    Bank,
    ConfigSnapshot,
    FeatureSnapshot,
    HistoryView,
    Quality,
    Reason,
    RowBlock,
    RowOutcome,
    Snapshot,
    StateError,
    Target,
    TargetSnapshot,
    check_settings,
)
from online.features import missing
from online.state import LEARNERS, Tree, part_of_tree
from online.transfer import HIDES_HITS

from .checkpoint import PROGRESS, Position, UnlearnedExports, state_files
from .load import RecentLoad

JOIN = "join"
TAKE_BYTES = 2 << 20
"""Most bytes of exports that are processed at once: more is hardly cheaper and delays what is published."""
SKEWED_MAX = 64
"""Most senders with a wrong clock that are warned of."""
_OF_REQUESTS = {Target.API_QUEUEING.value, Target.QUEUE_WAIT.value}
"""Targets learned from request spans beside engines that send their steps."""

_log = logging.getLogger(__name__)


class Pipeline:
    """Exports in, coefficients out.

    A configuration whose learner raises is quarantined, and the others go on: its rows are counted as ``quarantined``,
    and its half-updated models are forgotten, since absent is better than wrong. A restart begins anew with it.
    """

    def __init__(self, config: Config, resolver: ConfigResolver | None = None) -> None:
        self._settings = config
        self._spans = SpanWindow(config.engines_max)
        self.joiner = Joiner(config, resolver)
        """What is held between decoding and learning."""
        self._bank = Bank(config)
        self._quarantined: dict[str, str] = {}
        """By configuration, why."""
        self._counts = Counts()
        self._skewed: set[str] = set()
        self._load = RecentLoad(config.engines_max)
        self._unlearned = UnlearnedExports(config)
        # Replaced, never edited: other threads read them.
        self._workloads: dict[str, WorkloadProfile] = {}
        self._histories: dict[str, HistoryView] = {}
        self.on_event: Callable[[Event], None] | None = None
        """Sees what the join says, before it is learned."""
        self.processed_seq = 0
        """Number of the last entry of the log that has been processed."""

    @property
    def learned_rows(self) -> int:
        """Rows learned so far."""
        return self._bank.learned_rows

    @property
    def has_prior_prediction(self) -> bool:
        """Whether there is something to publish without rows: a sheet's prediction, sampled spans, a failed learner."""
        predicted = (self._bank.prior_prediction(name) is not None for name in self.joiner.emitters_by_config())
        return self.joiner.processes_sampled > 0 or bool(self._quarantined) or any(predicted)

    @property
    def revision(self) -> tuple[int, ...]:
        """Numbers whose change makes a new generation: rows, emitters, sampled processes, quarantined configurations.

        The number of processes with recent requests is among them, since advice ends with their load.
        """
        joiner = self.joiner
        held = len(joiner.emitters), joiner.processes_sampled
        return self.learned_rows, *held, len(self._quarantined), self._load.processes

    def workload_of(self, config_id: str) -> WorkloadProfile | None:
        """Recent workload of a configuration as of the newest snapshot; from any thread."""
        return self._workloads.get(config_id)

    def history_of(self, config_id: str) -> HistoryView | None:
        """Last rows and coefficients of the last day, as of the newest snapshot; from any thread."""
        return self._histories.get(config_id)

    def process(
        self,
        exports: Sequence[Export] = (),
        *,
        kv: Sequence[KvBatch] = (),
        pages: Sequence[ScrapedPage] = (),
        passes: Sequence[ForwardPass] = (),
    ) -> None:
        """Decode, join and learn; what cannot be used is counted."""
        # Even if an error of ours ends this batch: replaying what cannot be processed would fail again, for ever.
        is_logged = bool(exports) and exports[-1].seq > 0
        if is_logged:
            self._unlearned.begin(exports[0].seq, exports[-1].arrived_unix_ns)
            self.processed_seq = exports[-1].seq
        joiner = self.joiner
        for batch in kv:
            joiner.kv.add(batch)
        for page in pages:
            self._load.record_page(page)
            joiner.add_page(page)
        joiner.add_passes(passes)
        for telemetry in decode_exports(exports, self._spans.accept, self._counts):
            if telemetry.too_new_unix_ns:
                self._warn_of_skew(telemetry)
            if is_logged:
                self._unlearned.record(telemetry)
            if joiner.add(telemetry):
                self._load.record(telemetry)
        self._learn(joiner.drain())

    def _warn_of_skew(self, telemetry: Telemetry) -> None:
        """Warn once of each sender whose clock is ahead of ours."""
        ahead_ns = telemetry.too_new_unix_ns - telemetry.arrived_unix_ns
        if telemetry.instance not in self._skewed and len(self._skewed) < SKEWED_MAX:
            self._skewed.add(telemetry.instance)
            _log.warning(
                "%r tells of times that lie %.0f s ahead of the clock here; such spans are left out (out_of_range). "
                "Set its clock, or ours",
                telemetry.instance,
                ahead_ns / 1e9,
            )

    def flush(self) -> None:
        """End of a replay: everything held becomes rows, or is dropped for a reason."""
        self._learn(self.joiner.drain(flush=True))

    def flush_for_log(self) -> None:
        """Learn what waits as it is because the log is full, so that no entry so far is needed again.

        Else an engine's last step, from which the next row is measured, would keep its entry, and the log full.
        """
        self.flush()
        self._unlearned = UnlearnedExports(self._settings)

    # --- idle sources -----------------------------------------------------------------------------------------------

    def emit_idle(self, now_unix_ns: int) -> None:
        """Learn what idle sources hold; all that came before this time must have been processed."""
        self._load.forget_idle(now_unix_ns)
        self._learn(self.joiner.drain(now_unix_ns=now_unix_ns))

    def shed_memory(self) -> None:
        """Learn what is pending as it is, and drop the steps behind it, because memory is short."""
        self.flush()
        self.joiner.shed_memory()

    # --- what survives ----------------------------------------------------------------------------------------------

    def state(self) -> bytes:
        """The learned state, for a state file."""
        return self._bank.state()

    def add_donors(self, data: bytes) -> None:
        """Add donors for new configurations from a state file; StateError if it is none."""
        self._bank.add_donors(data)

    def to_checkpoint(self) -> tuple[Tree, Position]:
        """A checkpoint as its own copy: learners, calibration of the engines, and where a start reads the log."""
        read_from = self._unlearned.first_needed(self.joiner, self.processed_seq + 1)
        position = Position(self.processed_seq, read_from)
        return {
            LEARNERS: self._bank.to_state(),
            JOIN: self.joiner.to_checkpoint(),
            PROGRESS: msgspec.structs.asdict(position),
        }, position

    def from_checkpoint(self, tree: Tree, now_unix_ns: int = 0) -> Position:
        """Continue from a checkpoint; 0: nobody knows what time it is.

        Returns:
            Where the log is read again.

        Raises:
            StateError: it does not fit; the pipeline is as it was before.
        """
        progress = part_of_tree(tree, PROGRESS)
        try:
            position = msgspec.convert(progress, Position)
            joiner = Joiner.from_checkpoint(tree.get(JOIN), self._settings, self.joiner.resolver, now_unix_ns)
        except msgspec.ValidationError as error:
            raise StateError(f"does not fit: {error}") from None
        self._bank.from_state(part_of_tree(tree, LEARNERS))
        self.joiner, self._spans = joiner, SpanWindow(self._settings.engines_max)
        self._unlearned = UnlearnedExports(self._settings)
        self.processed_seq = position.read_from - 1
        return position

    def take_counts(self) -> Counts:
        """Counts since the last call."""
        counts, self._counts = self._counts, Counts()
        counts.merge(self.joiner.take_counts())
        counts[table.QUARANTINED,] = len(self._quarantined)
        counts[table.LIMIT_EXCEEDED, "configs"] = len(self._bank.refused)
        return counts

    def _learn(self, events: Iterable[Event]) -> None:
        """Apply events of the join to the learners, in order."""
        for event in events:
            if self.on_event is not None:
                self.on_event(event)
            match event:
                case ConfigKeyChanged(old, new):
                    _log.info("configuration %s is %s now, as more is known of it", old, new)
                    self._bank.rename(old, new)
                    if old in self._quarantined:
                        self._quarantined.setdefault(new, self._quarantined.pop(old))
                case ConfigUpdated(config_id, facts, quality):
                    self._bank.describe(config_id, {**facts, HIDES_HITS: hides_hits(quality, facts)})
                    held = self.joiner.emitters_by_config()
                    self._quarantined = {name: why for name, why in self._quarantined.items() if name in held}
                    text = "configuration %s: telemetry quality %s, facts known: %d"
                    _log.info(text, config_id, quality.label, len(facts))
                case Rows(config_id, target, rows, engines):
                    for outcome, count in self._learn_rows(config_id, target, rows, engines).items():
                        self._counts[table.ROWS, target, outcome] += count
                case ConfigReplaced(old, new):
                    self._bank.warm_start(new, old)

    def _learn_rows(
        self, config_id: str, target: Target, rows: RowBlock, engines: Mapping[int, str] | None
    ) -> Mapping[RowOutcome, int]:
        """Learn rows in the bank, and count what became of them."""
        if config_id not in self._quarantined:
            try:
                return self._bank.learn(config_id, target, rows, engines)
            except Exception as error:  # noqa: BLE001 -- whatever a learner raises
                self._quarantine(config_id, f"{target}: {type(error).__name__}")
        return Counter({RowOutcome.QUARANTINED: len(rows)})

    def _quarantine(self, config_id: str, why: str) -> None:
        self._quarantined[config_id] = why
        self._bank.drop(config_id)
        _log.exception("configuration %s is quarantined: its learner raised", config_id)

    def snapshot(self, now_unix_nano: int, generation: int) -> Snapshot:
        """Snapshot of all configurations; it changes no state."""
        by_config = self.joiner.emitters_by_config()
        replaced = replaced_configs(by_config, self._settings.lateness_ns)
        configs = [
            self._config(config_id, emitters, replaced.get(config_id, ""))
            for config_id, emitters in sorted(by_config.items())
        ]
        self._workloads = self._load.workloads(configs, now_unix_nano)
        histories = {config.config_id: self._bank.history(config.config_id) for config in configs}
        self._histories = {config_id: history for config_id, history in histories.items() if history is not None}
        return Snapshot(
            generation=generation,
            created_unix_nano=now_unix_nano,
            tracefit_version=__version__,
            configs=configs,
        )

    def _config(self, config_id: str, emitters: Sequence[Emitter], replaced_by: str) -> ConfigSnapshot:
        facts, quality = facts_of(emitters), quality_of(emitters)
        sources: dict[str, str] = {}
        for emitter in emitters:
            sources |= emitter.facts.sources()
        hidden = hides_hits(quality, facts)
        # nothing more comes of one that is silent while others go on, and its doubts would stay for good
        silent_unix_ns = max(emitter.event_unix_ns for emitter in emitters) - self._settings.timeout_ns
        heard = [emitter for emitter in emitters if emitter.event_unix_ns >= silent_unix_ns]
        shares = [emitter.span_share for emitter in heard]
        share, is_counted = min(filter(None, shares), default=1.0), self.joiner.counts_requests_of(config_id)
        is_known = quality is Quality.REQUESTS and (is_counted or share < NEARLY_WHOLE)
        sampling: dict[str, Fact] = {"trace_sampling": round(share, 3)} if is_known else {}
        if quality is Quality.SAMPLED:
            sampling["step_sampling"] = round(min(emitter.step_share for emitter in emitters), 3)
        targets = self._targets(config_id, emitters, hits_hidden=hidden)
        targets = weakened_by_sampling(targets, quality, share, is_counted=is_counted)
        is_of_means = quality in (Quality.REQUESTS, Quality.METRICS)
        doubted = (Target.STEP_TIME.value, *([Target.API_QUEUEING.value] if is_of_means else []))
        measured = {name for name, value in sampling.items() if facts.get(name) != value}
        return ConfigSnapshot(
            config_id=config_id,
            config=facts | sampling,
            sources=sources | dict.fromkeys(measured, FactSource.TELEMETRY.label),
            cannot_derive=missing(self._settings.feature_sets, facts),
            engines=[emitter.snapshot() for emitter in emitters],
            telemetry=quality.label,
            targets=targets,
            quarantined=self._quarantined.get(config_id, ""),
            doubts=[
                *filter(None, [unknown_experts(facts)]),
                *doubts_of(shares, {emitter.missing_reason for emitter in heard if emitter.missing_reason}),
                *(doubt for name in doubted if name in targets for doubt in targets[name].doubts),
            ],
            prefix_hits_hidden=hidden,
            last_heard_unix_nano=max((each.event_unix_ns for each in emitters if not each.recording), default=0),
            replaced_by=replaced_by,
        )

    def _targets(self, config_id: str, emitters: Sequence[Emitter], *, hits_hidden: bool) -> dict[str, TargetSnapshot]:
        targets: dict[str, TargetSnapshot] = {}
        if config_id not in self._quarantined:
            try:
                targets = self._bank.targets(config_id)
            except Exception as error:  # noqa: BLE001 -- whatever a learner raises
                self._quarantine(config_id, f"snapshot: {type(error).__name__}")
        step = targets.get(Target.STEP_TIME.value)
        queueings = [emitter.api_queueing for emitter in emitters]
        api = with_fallbacks(targets.pop(Target.API_QUEUEING.value, None), queueings, step, hits_hidden=hits_hidden)
        if api is not None:
            targets[Target.API_QUEUEING.value] = api
        if step is not None and hits_hidden:
            targets[Target.STEP_TIME.value] = weakened(step, Reason.HIDDEN_PREFIX_HITS, "prefill_tokens")
        return dict(sorted(targets.items()))


def hides_hits(quality: Quality, facts: Mapping[str, Fact]) -> bool:
    """Whether the telemetry counts cached prompt tokens as computed ones."""
    told = facts.get(HIDES_HITS)
    if facts.get("enable_prefix_caching") is False or told is False:
        return False
    return quality in (Quality.JOURNEYS, Quality.REQUESTS) or (quality is Quality.SAMPLED and told is True)


def weakened_by_sampling(
    targets: dict[str, TargetSnapshot], quality: Quality, share: float, *, is_counted: bool
) -> dict[str, TargetSnapshot]:
    """What may be said of targets where such a share of the requests sends a span, as far as they are counted."""
    if share < WHOLE:  # what was learned before spans were sampled is not told of them
        return {}
    if share >= NEARLY_WHOLE and is_counted:
        return targets
    reason = Reason.SAMPLED if share < NEARLY_WHOLE else Reason.UNCOUNTED
    of_requests = targets.keys() if quality is Quality.REQUESTS else _OF_REQUESTS
    return {name: weakened(each, reason) if name in of_requests else each for name, each in targets.items()}


def weakened(target: TargetSnapshot, reason: Reason, only: str = "") -> TargetSnapshot:
    """The target with learned coefficients ``weak`` at best, for this reason; those of a data sheet stay.

    For one feature it replaces any other reason; for all features, only reasons that more rows would remove.
    """

    def weak(feature: FeatureSnapshot) -> FeatureSnapshot:
        is_meant = feature.name == only if only else feature.reason in (None, Reason.FEW_ROWS)
        if not is_meant or feature.status == "prior_only":
            return feature
        return replace(feature, status="weak" if feature.status == "identified" else feature.status, reason=reason)

    models = {name: replace(model, features=[*map(weak, model.features)]) for name, model in target.models.items()}
    return replace(target, models=models)


def check_learning(config: Config) -> None:
    """Raises ConfigError for a learner, feature set or detector that nobody knows."""
    try:
        check_settings(config)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        known = key in Config.__struct_fields__
        raise ConfigError(*((key, problem) if known else ("custom", str(error)))) from None


def make_pipeline(config: Config, resolver: ConfigResolver | None = None) -> Pipeline:
    """The pipeline that the configuration asks for."""
    check_learning(config)
    pipeline = Pipeline(config, resolver)
    for number, path in enumerate(config.donors):
        try:
            files = state_files(Path(path))
            for file in files:
                pipeline.add_donors(file.read_bytes())
        except (OSError, StateError) as error:
            raise ConfigError(f"donors[{number}]", f"{path}: {sentence(error)}") from None
        if not files:
            raise ConfigError(f"donors[{number}]", f"there is no *.bin in {path}")
    return pipeline
