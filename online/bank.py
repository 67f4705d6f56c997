"""The bank: configurations x targets x models; rows in, snapshots out.

    learn(config, target, rows)  -> Counter of RowOutcome, whose values sum to the rows received
    targets(config)              -> what is published now, from a flushed copy: reading changes nothing

Rows come in event-time order. They are evaluated when they come and learned in blocks that the rows themselves cut
(online/blocks.py). Names of models: a feature set's name for the default learner ``rls``, ``<learner>/<set>`` for the
others. Every container is bounded by a name in :class:`BankSettings`.
"""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec
import numpy as np

from online.blocks import Cutter, Design, strata_of
from online.covariance_learner import CovarianceLearner
from online.features import Facts, FeatureSet, build, custom, registered
from online.learner import LearnerSettings, RlsLearner
from online.river_models import PREFIX, RiverLearner, make
from online.rows import Lane, RowBlock, Target
from online.snapshot import ModelSnapshot, TargetSnapshot

DEFAULT_LEARNER = "rls"
COVARIANCE = "rls_covariance"


class RowOutcome(enum.StrEnum):
    """What became of a row; received = the sum over all of them."""

    LEARNED = "learned"
    NOT_FINITE = "not_finite"
    NOT_POSITIVE = "not_positive"
    OUT_OF_RANGE = "out_of_range"
    UNKNOWN_FEATURE = "unknown_feature"


class BankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to learn with, and every bound.

    Attributes:
        learners: ``rls``, ``rls_covariance``, ``river:linear``, ``river:<dotted name>``.
        feature_sets: registered names, or ``custom``.
        live_sets: feature sets that only predict (free of sign, not published).
        custom: raw names per target of the set ``custom``.
        block_rows: rows of a block; detection and champion react once per block.
        block_ns: event time after which a block ends.
        configs_max: configurations kept; the one that learned least recently goes.
        value_max: a feature or a time (us) beyond this is not a measurement.
        elapsed_us_min: a time below this is not a measurement.
    """

    learners: tuple[str, ...] = (DEFAULT_LEARNER, "river:linear")
    feature_sets: tuple[str, ...] = ("portable",)
    live_sets: tuple[str, ...] = ("shape",)
    custom: Mapping[str, tuple[str, ...]] = {}
    block_rows: int = 32
    block_ns: int = 1_000_000_000
    configs_max: int = 64
    value_max: float = 1e12
    elapsed_us_min: float = 1e-3
    rls: LearnerSettings = LearnerSettings()

    def check(self) -> None:
        """Raises ValueError naming the first key that cannot work."""
        for name in self.learners:
            if name.startswith(PREFIX):
                make(name)
            elif name not in (DEFAULT_LEARNER, COVARIANCE):
                raise ValueError(f"learners: {name!r} is not {DEFAULT_LEARNER}, {COVARIANCE} or {PREFIX}<name>")
        for name in (*self.feature_sets, *self.live_sets):
            if name != "custom" and name not in registered():
                raise ValueError(f"feature_sets: {name!r} is not one of {', '.join((*registered(), 'custom'))}")
        for target, names in self.custom.items():
            custom(Target(target), names)
        for key in ("block_rows", "block_ns", "configs_max"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: expected an integer >= 1, got {getattr(self, key)}")


Model = RlsLearner | RiverLearner | CovarianceLearner


class _TargetState:
    """One target of one configuration: the partial block, and the models with the columns each reads."""

    def __init__(self, target: Target, settings: BankSettings) -> None:
        self.target = target
        self.settings = settings
        self.cutter = Cutter(settings.block_rows, settings.block_ns)
        self.sets: dict[str, tuple[FeatureSet, slice]] = {}
        self.models: dict[str, tuple[str, Model]] = {}
        self.columns = 0

    def offer(self, features: FeatureSet, *, published: bool) -> None:
        """Start models on a feature set that has become available."""
        if features.name in self.sets:
            return
        self.sets[features.name] = (features, slice(self.columns, self.columns + len(features)))
        self.columns += len(features)
        self.cutter.widen(self.columns)
        for learner in self.settings.learners if published else (DEFAULT_LEARNER,):
            key = features.name if learner == DEFAULT_LEARNER else f"{learner}/{features.name}"
            self.models[key] = (features.name, self._make(learner, features))

    def _make(self, learner: str, features: FeatureSet) -> Model:
        if learner == DEFAULT_LEARNER:
            return RlsLearner(features, self.settings.rls)
        if learner == COVARIANCE:
            return CovarianceLearner(features)
        return RiverLearner(learner, features)

    def evaluate(self, rows: RowBlock) -> tuple[Design, Counter[RowOutcome]]:
        """Columns of all sets side by side; rows that are no measurement are left out and counted."""
        limit, least = self.settings.value_max, self.settings.elapsed_us_min
        y, weight = rows.elapsed_us, rows.weight
        finite = np.isfinite(y) & np.isfinite(weight) & np.isfinite(rows.phase).all(axis=1)
        positive = (y > 0.0) & (weight > 0.0)
        x = np.empty((len(rows), self.columns))
        known = np.zeros(len(rows), np.bool_)
        bounded = (y >= least) & (y <= limit) & (weight <= limit) & (weight >= 1.0 / limit)
        with np.errstate(invalid="ignore", over="ignore"):
            for features, where in self.sets.values():
                part = features.evaluate(rows)
                inside = np.abs(part) <= limit
                known |= np.isfinite(part).all(axis=1)
                bounded &= (inside | ~np.isfinite(part)).all(axis=1)
                x[:, where] = np.where(inside, part, np.nan)
        outcome = Counter(
            {
                RowOutcome.NOT_FINITE: int(np.count_nonzero(~finite)),
                RowOutcome.NOT_POSITIVE: int(np.count_nonzero(finite & ~positive)),
                RowOutcome.OUT_OF_RANGE: int(np.count_nonzero(finite & positive & ~bounded)),
                RowOutcome.UNKNOWN_FEATURE: int(np.count_nonzero(finite & positive & bounded & ~known)),
            }
        )
        good = finite & positive & bounded & known
        outcome[RowOutcome.LEARNED] = int(np.count_nonzero(good))
        stratum, cell = strata_of(self.target, rows)
        design = Design(x, rows.phase, y, rows.steps.astype(np.float64), weight, stratum, cell, rows.end_ns)
        return (design if good.all() else design.take(good)), outcome

    def learn(self, design: Design) -> None:
        for block in self.cutter.push(design):
            self.learn_block(block)

    def learn_block(self, block: Design) -> None:
        views: dict[str, Design] = {}
        for name, (_, where) in self.sets.items():
            views[name] = _view(block, where)
        for name, model in self.models.values():
            if len(views[name]):
                model.learn(views[name])

    def flush(self) -> None:
        if len(self.cutter):
            self.learn_block(self.cutter.flush())

    def snapshot(self) -> TargetSnapshot | None:
        """None while there is nothing to say."""
        models: dict[str, ModelSnapshot] = {}
        for name, (_, model) in sorted(self.models.items()):
            snapshot = model.snapshot()
            if snapshot is not None:
                models[name] = snapshot
        champion = self._champion()
        if champion is None or champion not in models:
            return None
        learner = self.models[champion][1]
        rls = learner if isinstance(learner, RlsLearner) else None
        return TargetSnapshot(
            vector=self.target.vector,
            unit="us",
            champion=champion,
            models=models,
            interval=None if rls is None else rls.intervals.snapshot(by_stratum=self.target.vector == "beta"),
            drift=None if rls is None else rls.drift.snapshot(),
            mean_us=None if rls is None else rls.mean_us(),
            mean_factor=None if rls is None else rls.mean_factor(),
            live_champion=self._live_champion(models),
        )

    @staticmethod
    def _live_champion(models: dict[str, ModelSnapshot]) -> str | None:
        """The model whose live prediction has the lowest error lately."""
        errors = {name: m.live_error or m.error for name, m in models.items()}
        seen = {name: error.mape for name, error in errors.items() if error is not None}
        return min(seen, key=seen.__getitem__, default=None)

    def _champion(self) -> str | None:
        """The published model with the lowest prequential error; the first configured one before there is any."""
        published = [
            name
            for name, (features, model) in self.models.items()
            if features in self.settings.feature_sets and not isinstance(model, RiverLearner) and model.started
        ]

        def error(name: str) -> float:
            seen = self.models[name][1].error.snapshot()
            return float("inf") if seen is None else seen.mape

        return min(published, key=error, default=None)


def _view(block: Design, where: slice) -> Design:
    x = block.x[:, where]
    known = np.atleast_1d(np.isfinite(x).all(axis=1))
    if bool(known.all()):
        view = block.slice(0, len(block))
        view.groups = block.grouped()
    else:
        view = block.take(known)
        x = x[known]
    view.x = x
    return view


class Bank:
    """All that is learned. One thread learns; readers get immutable snapshots.

    Args:
        settings: checked here; ValueError names the key.
    """

    def __init__(self, settings: BankSettings | None = None) -> None:
        self.settings = BankSettings() if settings is None else settings
        self.settings.check()
        self.learned_rows = 0
        self.evictions = 0
        self._configs: OrderedDict[str, dict[Target, _TargetState]] = OrderedDict()
        self._facts: dict[str, dict[str, str | int | float | bool]] = {}

    def learn(self, config_id: str, target: Target, rows: RowBlock, lane: Lane = Lane.PUBLISHED) -> Counter[RowOutcome]:
        """Learn rows of one target; what became of them."""
        if not len(rows) or lane is Lane.QUICK:
            return Counter()
        state = self._state(config_id, target)
        design, outcome = state.evaluate(rows)
        if len(design):
            state.learn(design)
            self.learned_rows += len(design)
        return outcome

    def _state(self, config_id: str, target: Target) -> _TargetState:
        targets = self._configs.get(config_id)
        if targets is None:
            while len(self._configs) >= self.settings.configs_max:
                evicted, _ = self._configs.popitem(last=False)
                self._facts.pop(evicted, None)
                self.evictions += 1
            targets = self._configs[config_id] = {}
        self._configs.move_to_end(config_id)
        if target not in targets:
            targets[target] = _TargetState(target, self.settings)
            self._offer(config_id, targets[target])
        return targets[target]

    def _offer(self, config_id: str, state: _TargetState) -> None:
        facts = self._facts.get(config_id, {})
        for names, published in ((self.settings.feature_sets, True), (self.settings.live_sets, False)):
            for name in names:
                features = self._build(name, state.target, facts)
                if features is not None:
                    state.offer(features, published=published)

    def _build(self, name: str, target: Target, facts: Facts) -> FeatureSet | None:
        if name == "custom":
            names = self.settings.custom.get(target.value)
            return custom(target, names) if names else None
        return build(name, target, facts)

    def describe(self, config_id: str, facts: Facts) -> None:
        """Facts of a configuration (model, gpu, ...): feature sets that need them start when they can."""
        known = self._facts.setdefault(config_id, {})
        known.update(facts)
        for state in self._configs.get(config_id, {}).values():
            self._offer(config_id, state)

    def rename(self, old: str, new: str) -> None:
        """A configuration's identity became better known: its state goes under the new id, if that is free."""
        if old == new or old not in self._configs:
            return
        state, facts = self._configs.pop(old), self._facts.pop(old, {})
        if new not in self._configs:
            self._configs[new] = state
            self._facts[new] = {**facts, **self._facts.get(new, {})}

    def drop(self, config_id: str) -> None:
        """Forget a configuration."""
        self._configs.pop(config_id, None)
        self._facts.pop(config_id, None)

    def configs(self) -> list[str]:
        """Known configurations, the one that learned least recently first."""
        return list(self._configs)

    def targets(self, config_id: str) -> dict[str, TargetSnapshot]:
        """What is published of a configuration now, partial blocks included."""
        found: dict[str, TargetSnapshot] = {}
        for target, state in self._configs.get(config_id, {}).items():
            flushed = copy.deepcopy(state)
            flushed.flush()
            snapshot = flushed.snapshot()
            if snapshot is not None:
                found[target.value] = snapshot
        return dict(sorted(found.items()))
