"""One target of one configuration: its partial blocks, and the models with the columns each of them reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from online.blocks import Cutter, Design
from online.drift import Speed, Verdict
from online.features import FeatureSet
from online.prediction import Residuals, ShapedPrediction
from online.rls import Prior, RlsLearner, merge, with_jackknife
from online.rows import Quality, RowBlock, RowOutcome, Target
from online.snapshot import ErrorSnapshot, ModelSnapshot, TargetSnapshot
from online.state import Kept, StateError, saved

from .design_matrix import DesignMatrix
from .learners import RLS, Learner, make_learner, publishes
from .settings import BankSettings, rates
from .window_rows import WindowRows

SHAPED = "portable"
"""The feature set that shape factors belong to."""

PriorFor = Callable[[FeatureSet], Prior | None]


@dataclass
class SavedTarget:
    """A target in the state file, with the columns of the design by set; models are filled once they are made."""

    STATE = saved(
        "target", fresh=lambda _: SavedTarget([], None, None, {}, Residuals(), {}, WindowRows(finer=True), 0, 0)
    )

    sets: list[tuple[str, list[str]]]
    pending: Design | None
    quick: Design | None
    models: dict[str, Kept]
    residuals: Residuals
    shaped: dict[str, Kept]
    windows: WindowRows
    first_ns: int
    last_ns: int


class TargetState:
    """See the module's docstring.

    Attributes:
        matrix: feature sets and their columns.
        models: learners by published name.
        shaped: the prediction of a step with shape factors; None for targets without shapes, or without ``portable``.
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
        self.shaped: ShapedPrediction | None = None
        self.windows = WindowRows()
        self.first_ns = self.last_ns = 0

    def offer(self, features: FeatureSet, prior_for: PriorFor) -> None:
        """Start models on a feature set that has become available."""
        if features.name in self.matrix.sets:
            return
        self.matrix.add(features)
        for cutter in (self.cutter, self.quick):
            cutter.widen(self.matrix.width)
        self.windows.widen(self.matrix.width)
        for learner in self.settings.learners:
            key = features.name if learner == RLS else f"{learner}/{features.name}"
            prior = prior_for(features) if learner == RLS else None
            self.models[key] = make_learner(learner, features, rates(self.settings), prior)
        if self.shaped is None and SHAPED in self.models and self.target.vector == "beta":
            self.shaped = ShapedPrediction(len(features))

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
        self.windows.learn(design, windows=bool((rows.quality == Quality.METRICS).all()))
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
        champion, watcher = self._predictor(), self._watcher()
        speed = None
        if watcher is not None:
            speed = self._learn_watched(watcher, views[watcher.features.name], is_champion=watcher is champion)
        for model in self.models.values():
            view = views[model.features.name]
            if model is watcher or model.needs_base or not len(view):
                continue
            log_ratio = model.learn(view, speed) if publishes(model) else model.learn(view)
            if model is champion and log_ratio is not None:
                self.residuals.learn(log_ratio)

    def _learn_watched(self, watcher: RlsLearner, view: Design, *, is_champion: bool) -> Speed:
        """The model that watches for changes of speed learns first: what it finds goes for all of them."""
        drift = watcher.members.drift
        if not len(view):
            return drift.unchanged()
        log_factors = watcher.log_factors(view.cell)
        log_ratio = watcher.learn(view)
        if is_champion and log_ratio is not None:
            self.residuals.learn(log_ratio)
        speed = watcher.members.speed or drift.unchanged()
        if self.shaped is not None and watcher is self.models[SHAPED]:
            self.shaped.learn(view, None if log_ratio is None else log_ratio - log_factors)
            found = speed.verdict
            self.shaped.follow(suspected=found is Verdict.ALARM, confirmed=found is Verdict.CONFIRMED)
        return speed

    def _watcher(self) -> RlsLearner | None:
        """``portable``, which every consumer computes and shape factors belong to; else the first that publishes."""
        model = self.models.get(SHAPED)
        return model if model is not None and publishes(model) else next(self.publishers(), None)

    def _predictor(self) -> RlsLearner | None:
        """The published champion as of now, without making a snapshot; None before the first fit."""
        best, least = None, np.inf
        for _, model in sorted(self.models.items()):
            if publishes(model) and model.started:
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
                if name == SHAPED and self.shaped is not None:
                    snapshot = msgspec.structs.replace(snapshot, prediction_error=self.shaped.error.snapshot())
                if self.windows.rows is not None and publishes(model):
                    snapshot = with_jackknife(snapshot, model, self.matrix.view(self.windows.rows, model.features.name))
                models[name] = snapshot
        champion = self._champion(models)
        if champion is None:
            return None
        watcher = self._watcher()
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
            residuals=self.residuals.snapshot(),
            drift=None if watcher is None else watcher.members.drift.snapshot(),
            mean_us=learner.mean_us(),
            live_champion=live_champion,
            **self._shape_parts(learner),
        )

    def _shape_parts(self, champion: RlsLearner) -> dict[str, Any]:
        """Shape factors, and what is relative to the prediction by them; by the champion where there are none."""
        shaped, model = self.shaped, self.models.get(SHAPED)
        if shaped is None or model is None or not publishes(model):
            intervals, mean_factor = champion.members.champion.intervals, champion.mean_factor()
            by_stratum = self.target.vector == "beta"
            return {"interval": intervals.snapshot(by_stratum=by_stratum), "mean_factor": mean_factor}
        return {
            "shape_factors": model.shape_factors(),
            "seen": shaped.seen(model.features.names),
            "interval": shaped.intervals.snapshot(),
            "mean_factor": shaped.mean_factor(),
        }

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
            shaped={} if self.shaped is None else {SHAPED: self.shaped},
            windows=self.windows,
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
        for cutter, pending in ((self.cutter, state.pending), (self.quick, state.quick)):
            if pending is not None:
                cutter.restore(self.matrix.rearranged(pending, same, width))
        if state.windows.rows is not None:
            self.matrix.rearranged(state.windows.rows, same, width)
        if self.shaped is not None and SHAPED in state.shaped and SHAPED in same:
            state.shaped[SHAPED].fill(self.shaped)
        self.residuals, self.windows = state.residuals, state.windows
        self.first_ns, self.last_ns = state.first_ns, state.last_ns
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
        if self.shaped is not None and other.shaped is not None:
            self.shaped.add(other.shaped)
        self.windows.add(other.windows, other_is_later=later)
        self.first_ns = min(self.first_ns or other.first_ns, other.first_ns)
        self.last_ns = max(self.last_ns, other.last_ns)


def _lowest(errors: dict[str, ErrorSnapshot | None]) -> str | None:
    """The name with the lowest mean error; the first one while nobody has been scored."""
    scored = {name: error.mape for name, error in errors.items() if error is not None}
    return min(scored, key=scored.__getitem__) if scored else next(iter(errors), None)
