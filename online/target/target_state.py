"""One target of one configuration: its partial blocks, and the models with the columns each of them reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from online.blocks import Cutter, Design
from online.features import FeatureSet
from online.prediction import Residuals
from online.rls import Prior, RlsLearner, merge
from online.rows import RowBlock, RowOutcome, Target
from online.snapshot import ErrorSnapshot, ModelSnapshot, TargetSnapshot
from online.state import Kept, StateError, saved

from .design_matrix import DesignMatrix
from .learners import RLS, Learner, make_learner, publishes
from .settings import BankSettings, rates

PriorFor = Callable[[FeatureSet], Prior | None]


@dataclass
class SavedTarget:
    """A target in the state file, with the columns of the design by set; models are filled once they are made."""

    STATE = saved("target", fresh=lambda _: SavedTarget([], None, None, {}, Residuals(), 0, 0))

    sets: list[tuple[str, list[str]]]
    pending: Design | None
    quick: Design | None
    models: dict[str, Kept]
    residuals: Residuals
    first_ns: int
    last_ns: int


class TargetState:
    """See the module's docstring.

    Attributes:
        matrix: feature sets and their columns.
        models: learners by published name.
        first_ns, last_ns: event time learned from, 0 before any row.
    """

    def __init__(self, target: Target, settings: BankSettings) -> None:
        self.target = target
        self.settings = settings
        # Nobody waits for a change in the others: half as many blocks, half the cost.
        rows, block_ns = settings.bank.block_rows, int(settings.bank.block_s * 1e9)
        self.cutter = Cutter(rows * (1 if target is Target.STEP_TIME else 2), block_ns)
        self.quick = Cutter(rows, block_ns)
        self.matrix = DesignMatrix(target)
        self.models: dict[str, Learner] = {}
        self.residuals = Residuals()
        self.first_ns = self.last_ns = 0

    def offer(self, features: FeatureSet, prior_for: PriorFor, *, published: bool) -> None:
        """Start models on a feature set that has become available."""
        if features.name in self.matrix.sets:
            return
        self.matrix.add(features)
        for cutter in (self.cutter, self.quick):
            cutter.widen(self.matrix.width)
        for learner in self.settings.learners if published else (RLS,):
            key = features.name if learner == RLS else f"{learner}/{features.name}"
            prior = prior_for(features) if learner == RLS else None
            self.models[key] = make_learner(learner, features, rates(self.settings), prior)

    def publishers(self) -> Iterator[RlsLearner]:
        """Learners whose coefficients are published, or predict by the same statistics."""
        return filter(publishes, self.models.values())

    # ---------------------------------------------------------------- rows in

    def learn(self, rows: RowBlock, *, quick: bool = False) -> Counter[RowOutcome]:
        """Cut rows into blocks and learn every block that is complete; what became of the rows."""
        design, outcome = self.matrix.evaluate(rows)
        if not len(design):
            return outcome
        if quick:
            for block in self.quick.push(design):
                self._learn_quick(block)
            return outcome
        first_ns = int(design.end_ns.min())
        self.first_ns = min(self.first_ns, first_ns) if self.first_ns else first_ns
        self.last_ns = max(self.last_ns, int(design.end_ns.max()))
        for block in self.cutter.push(design):
            self._learn_block(block)
        return outcome

    def _learn_block(self, block: Design) -> None:
        """All models learn one block of the published lane; those that correct another one first, before it learns."""
        views = {name: self.matrix.view(block, name) for name in self.matrix.sets}
        for model in self.models.values():
            view = views[model.features.name]
            if model.needs_base and len(view):
                base = self.models.get(model.features.name)
                if base is not None and base.started:
                    view.base_us = base.predict(view)
                    model.learn(view)
        champion = self._predictor()
        for model in self.models.values():
            view = views[model.features.name]
            if len(view) and not model.needs_base:
                log_ratio = model.learn(view)
                if model is champion and log_ratio is not None:
                    self.residuals.learn(log_ratio)

    def _predictor(self) -> RlsLearner | None:
        """The published champion as of now, without making a snapshot; None before the first fit."""
        best, least = None, np.inf
        for _, model in sorted(self.models.items()):
            if publishes(model) and model.started and not model.features.signed:
                mape = model.members.champion.error.mean()
                if best is None or mape < least:
                    best, least = model, mape
        return best

    def _learn_quick(self, block: Design) -> None:
        for model in self.publishers():
            view = self.matrix.view(block, model.features.name)
            if len(view):
                model.learn_quick(view)

    def flush(self) -> None:
        """Learn the partial block as it stands."""
        if len(self.cutter):
            self._learn_block(self.cutter.flush())
        if len(self.quick):
            self._learn_quick(self.quick.flush())

    # ---------------------------------------------------------------- reading

    def snapshot(self) -> TargetSnapshot | None:
        """None while there is nothing to say."""
        models: dict[str, ModelSnapshot] = {}
        for name, model in sorted(self.models.items()):
            snapshot = model.snapshot()
            if snapshot is not None:
                models[name] = snapshot
        champion = self._champion(models)
        if champion is None:
            return None
        learner, vector = self.models[champion], self.target.vector
        live_champion = _lowest({name: model.live_error or model.error for name, model in models.items()})
        if not publishes(learner):
            return TargetSnapshot(
                vector=vector, unit="us", champion=champion, models=models, live_champion=live_champion
            )
        return TargetSnapshot(
            vector=vector,
            unit="us",
            champion=champion,
            models=models,
            interval=learner.members.champion.intervals.snapshot(by_stratum=vector == "beta"),
            residuals=self.residuals.snapshot(),
            drift=learner.members.drift.snapshot(),
            mean_us=learner.mean_us(),
            mean_factor=learner.mean_factor(),
            live_champion=live_champion,
        )

    def _champion(self, models: dict[str, ModelSnapshot]) -> str | None:
        """The published ``rls`` model with the lowest error; without ``rls``, whatever has coefficients or is there."""
        listed = {name: model for name, model in models.items() if model.features} or models
        published = {name: model for name, model in listed.items() if publishes(self.models[name])} or listed
        return _lowest({name: model.error for name, model in published.items()})

    # ---------------------------------------------------------------- state

    def saved(self) -> SavedTarget:
        """For the state file; the objects in it are this target's own."""
        return SavedTarget(
            sets=[(name, list(features.names)) for name, (features, _) in self.matrix.sets.items()],
            pending=self.cutter.pending(),
            quick=self.quick.pending(),
            models={name: model for name, model in self.models.items() if model.is_saved},
            residuals=self.residuals,
            first_ns=self.first_ns,
            last_ns=self.last_ns,
        )

    def restore(self, state: SavedTarget) -> list[str]:
        """Fill this fresh target; the names of models in the state that are not configured with the same columns."""
        same, width = self.matrix.same_columns(state.sets)
        skipped = []
        for name, kept in state.models.items():
            if name in self.models and name.rpartition("/")[2] in same:
                kept.fill(self.models[name])
            else:
                skipped.append(name)
        for cutter, waiting in ((self.cutter, state.pending), (self.quick, state.quick)):
            if waiting is not None:
                if waiting.x.shape[1] != width:
                    raise StateError(f"waiting rows of {waiting.x.shape[1]} columns, expected {width}")
                cutter.restore(self.matrix.rearranged(waiting, same))
        self.residuals, self.first_ns, self.last_ns = state.residuals, state.first_ns, state.last_ns
        return skipped

    def merge(self, other: TargetState) -> None:
        """Add what another state of this target knows; both are flushed, ``other`` is used up."""
        self.flush()
        other.flush()
        later = other.first_ns >= self.last_ns
        side_by_side = not later and other.last_ns > self.first_ns
        for name, model in self.models.items():
            theirs = other.models.get(name)
            if theirs is None or not publishes(model) or not publishes(theirs):
                continue
            if model.features.names != theirs.features.names:
                raise StateError(
                    f"model {name!r}: {model.features.names} cannot be merged with {theirs.features.names}"
                )
            merge(model, theirs, other_is_later=later, side_by_side=side_by_side)
        self.residuals.add(other.residuals)
        self.first_ns = min(self.first_ns or other.first_ns, other.first_ns)
        self.last_ns = max(self.last_ns, other.last_ns)


def _lowest(errors: dict[str, ErrorSnapshot | None]) -> str | None:
    """The name with the lowest mean error; the first one while nobody has been scored."""
    scored = {name: error.mape for name, error in errors.items() if error is not None}
    return min(scored, key=scored.__getitem__) if scored else next(iter(errors), None)
