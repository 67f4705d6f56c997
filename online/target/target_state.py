"""One target of one configuration: its partial blocks, and the models with the columns each of them reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from online.blocks import Cutter, Design, strata_of
from online.features import FeatureSet
from online.prediction import Residuals
from online.river import ResidualLearner
from online.rls import Prior, RlsLearner, learner_state
from online.rows import RowBlock, RowOutcome, Target
from online.snapshot import ErrorSnapshot, ModelSnapshot, TargetSnapshot
from online.state import State, StateError

from .learners import RLS, Model, make_learner
from .settings import BankSettings, rates

PriorFor = Callable[[str, tuple[str, ...]], Prior | None]

VALUE_MAX = 1e12
"""A feature, weight or time (us) beyond this is not a measurement."""

ELAPSED_US_MIN = 1e-3
"""A time below this is not a measurement."""


class TargetState:
    """See the module's docstring.

    Attributes:
        sets: feature sets by name, with the columns of the design each has.
        models: by published name: the feature set's name and the learner.
        first_ns, last_ns: event time learned from, 0 before any row.
    """

    def __init__(self, target: Target, settings: BankSettings) -> None:
        self.target = target
        self.settings = settings
        # Nobody waits for a change in the others: half as many blocks, half the cost.
        rows, block_ns = settings.bank.block_rows, int(settings.bank.block_s * 1e9)
        self.cutter = Cutter(rows * (1 if target is Target.STEP_TIME else 2), block_ns)
        self.quick = Cutter(rows, block_ns)
        self.sets: dict[str, tuple[FeatureSet, slice]] = {}
        self.models: dict[str, tuple[str, Model]] = {}
        self.residuals = Residuals()
        self.columns = 0
        self.first_ns = self.last_ns = 0

    def offer(self, features: FeatureSet, prior_for: PriorFor, *, published: bool) -> None:
        """Start models on a feature set that has become available."""
        if features.name in self.sets:
            return
        self.sets[features.name] = (features, slice(self.columns, self.columns + len(features)))
        self.columns += len(features)
        for cutter in (self.cutter, self.quick):
            cutter.widen(self.columns)
        for learner in self.settings.learners if published else (RLS,):
            key = features.name if learner == RLS else f"{learner}/{features.name}"
            self.models[key] = (features.name, self._make(learner, features, prior_for))

    def _make(self, learner: str, features: FeatureSet, prior_for: PriorFor) -> Model:
        prior = prior_for(features.name, features.names) if learner == RLS else None
        return make_learner(learner, features, rates(self.settings), prior)

    def rls_models(self) -> Iterator[tuple[str, RlsLearner]]:
        """Feature set and learner of each ``rls`` model."""
        for features, model in self.models.values():
            if isinstance(model, RlsLearner):
                yield features, model

    # ---------------------------------------------------------------- rows in

    def evaluate(self, rows: RowBlock) -> tuple[Design, Counter[RowOutcome]]:
        """Columns of all sets side by side; rows that are no measurement are left out and counted."""
        y, weight = rows.elapsed_us, rows.weight
        finite = np.isfinite(y) & np.isfinite(weight) & np.isfinite(rows.phase).all(axis=1)
        positive = (y > 0.0) & (weight > 0.0)
        x = np.empty((len(rows), self.columns))
        known = np.zeros(len(rows), np.bool_)
        complete = True
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            bounded = (y >= ELAPSED_US_MIN) & (y <= VALUE_MAX) & (weight <= VALUE_MAX) & (weight >= 1.0 / VALUE_MAX)
            bounded &= (np.abs(rows.phase) <= 1.0).all(axis=1)
            for features, where in self.sets.values():
                part = features.evaluate(rows)
                x[:, where] = part
                inside = (np.abs(part) <= VALUE_MAX).all(axis=1)
                here = np.isfinite(part).all(axis=1)
                known |= here
                bounded &= inside | ~here
                complete &= bool(inside.all())
        good = finite & positive & bounded & known
        learned = int(np.count_nonzero(good))
        outcome = Counter({RowOutcome.LEARNED: learned})
        if learned < len(rows):
            outcome[RowOutcome.NOT_FINITE] = int(np.count_nonzero(~finite))
            outcome[RowOutcome.NOT_POSITIVE] = int(np.count_nonzero(finite & ~positive))
            outcome[RowOutcome.OUT_OF_RANGE] = int(np.count_nonzero(finite & positive & ~bounded))
            outcome[RowOutcome.UNKNOWN_FEATURE] = int(np.count_nonzero(finite & positive & bounded & ~known))
            if not learned:  # as of every target for which no set is configured
                return Design.empty(self.columns), outcome
        stratum, cell = strata_of(self.target, rows)
        steps = rows.steps.astype(np.float64)
        design = Design(x, rows.phase, y, steps, weight, stratum, cell, rows.end_ns, complete)
        return (design if learned == len(rows) else design.take(good)), outcome

    def learn(self, design: Design, *, quick: bool = False) -> None:
        """Cut rows into blocks and learn every block that is complete."""
        if quick:
            for block in self.quick.push(design):
                self._learn_quick(block)
            return
        first = int(design.end_ns.min())
        self.first_ns = min(self.first_ns, first) if self.first_ns else first
        self.last_ns = max(self.last_ns, int(design.end_ns.max()))
        for block in self.cutter.push(design):
            self.learn_block(block)

    def learn_block(self, block: Design) -> None:
        """All models learn one block of the published lane."""
        views = {name: _view(block, where) for name, (_, where) in self.sets.items()}
        for name, model in self.models.values():
            view = views[name]
            if not len(view):
                continue
            if isinstance(model, ResidualLearner):
                base = self.models.get(name, (name, None))[1]
                if isinstance(base, RlsLearner) and base.started:
                    model.learn(view, base.predict(view.x))
        champion = self._predictor()
        for name, model in self.models.values():
            if len(views[name]) and not isinstance(model, ResidualLearner):
                log_ratio = model.learn(views[name])
                if model is champion and log_ratio is not None:
                    self.residuals.learn(log_ratio)

    def _predictor(self) -> RlsLearner | None:
        """The champion among ``rls`` models as of now, without making a snapshot; None before the first fit."""
        best, least = None, np.inf
        for _, (_, model) in sorted(self.models.items()):
            if isinstance(model, RlsLearner) and model.started and not model.signed:
                mape = model.error.sum_ape / model.error.total if model.error.total > 0.0 else np.inf
                if best is None or mape < least:
                    best, least = model, mape
        return best

    def _learn_quick(self, block: Design) -> None:
        for name, model in self.rls_models():
            view = _view(block, self.sets[name][1])
            if len(view):
                model.learn_quick(view)

    def flush(self) -> None:
        """Learn the partial block as it stands."""
        if len(self.cutter):
            self.learn_block(self.cutter.flush())
        if len(self.quick):
            self._learn_quick(self.quick.flush())

    # ---------------------------------------------------------------- reading

    def snapshot(self) -> TargetSnapshot | None:
        """None while there is nothing to say."""
        models: dict[str, ModelSnapshot] = {}
        for name, (_, model) in sorted(self.models.items()):
            snapshot = model.snapshot()
            if snapshot is not None:
                models[name] = snapshot
        champion = self._champion(models)
        if champion is None:
            return None
        learner = self.models[champion][1]
        rls = learner if isinstance(learner, RlsLearner) else None
        return TargetSnapshot(
            vector=self.target.vector,
            unit="us",
            champion=champion,
            models=models,
            interval=None if rls is None else rls.intervals.snapshot(by_stratum=self.target.vector == "beta"),
            residuals=None if rls is None else self.residuals.snapshot(),
            drift=None if rls is None else rls.drift.snapshot(),
            mean_us=None if rls is None else rls.mean_us(),
            mean_factor=None if rls is None else rls.mean_factor(),
            live_champion=_lowest({n: m.live_error or m.error for n, m in models.items()}),
        )

    def _champion(self, models: dict[str, ModelSnapshot]) -> str | None:
        """The published ``rls`` model with the lowest error; without ``rls``, whatever has coefficients or is there."""
        listed = {n: m for n, m in models.items() if m.features} or models
        own = {n: m for n, m in listed.items() if isinstance(self.models[n][1], RlsLearner)} or listed
        return _lowest({n: m.error for n, m in own.items()})

    # ---------------------------------------------------------------- state

    def state(self) -> State:
        """For the state file."""
        pending, quick = self.cutter.pending(), self.quick.pending()
        return {
            "sets": [[name, list(features.names)] for name, (features, _) in self.sets.items()],
            "pending": None if pending is None else pending.state(),
            "quick": None if quick is None else quick.state(),
            "models": {name: _model_state(model) for name, (_, model) in self.models.items()},
            "residuals": self.residuals.state(),
            "first_ns": self.first_ns,
            "last_ns": self.last_ns,
        }

    def restore(self, state: State) -> list[str]:
        """Fill this fresh target; the names of models in the state that are not configured with the same columns."""
        same: dict[str, slice] = {}
        start = 0
        for name, columns in state["sets"]:
            if name in self.sets and list(self.sets[name][0].names) == columns:
                same[name] = slice(start, start + len(columns))
            start += len(columns)
        skipped = []
        for name, saved in state["models"].items():
            set_name = name.rpartition("/")[2]
            if name not in self.models or set_name not in same:
                skipped.append(name)
                continue
            model = self.models[name][1]
            if isinstance(model, RlsLearner):
                learner_state.restore(model, saved)
            else:
                model.restore(saved)
        for cutter, key in ((self.cutter, "pending"), (self.quick, "quick")):
            if state[key] is not None:
                cutter.restore(self._rearranged(Design.restored(state[key], start), same))
        if state["residuals"] is not None:  # None: of a version that did not count them
            self.residuals.restore(state["residuals"])
        self.first_ns, self.last_ns = int(state["first_ns"]), int(state["last_ns"])
        return skipped

    def _rearranged(self, waiting: Design, same: dict[str, slice]) -> Design:
        x = np.full((len(waiting), self.columns), np.nan)
        for name, where in same.items():
            x[:, self.sets[name][1]] = waiting.x[:, where]
        waiting.x = x
        return waiting

    def merge(self, other: TargetState) -> None:
        """Add what another state of this target knows; both are flushed, ``other`` is used up."""
        self.flush()
        other.flush()
        later = other.first_ns >= self.last_ns
        side_by_side = not later and other.last_ns > self.first_ns
        for name, (_, model) in self.models.items():
            theirs = other.models.get(name, (name, None))[1]
            if isinstance(model, RlsLearner) and isinstance(theirs, RlsLearner):
                if model.features.names != theirs.features.names:
                    raise StateError(
                        f"model {name!r}: {model.features.names} cannot be merged with {theirs.features.names}"
                    )
                learner_state.merge(model, theirs, other_is_later=later, side_by_side=side_by_side)
        self.residuals.add(other.residuals)
        self.first_ns = min(self.first_ns or other.first_ns, other.first_ns)
        self.last_ns = max(self.last_ns, other.last_ns)


def _view(block: Design, where: slice) -> Design:
    x = block.x[:, where]
    if not block.complete:
        known = np.atleast_1d(np.isfinite(x).all(axis=1))
        if not known.all():
            view = block.take(known)
            view.x = x[known]
            return view
    view = block.slice(0, len(block))
    view.x, view.groups = x, block.grouped()
    return view


def _lowest(errors: dict[str, ErrorSnapshot | None]) -> str | None:
    """The name with the lowest mean error; the first one while nobody has been scored."""
    seen = {name: error.mape for name, error in errors.items() if error is not None}
    return min(seen, key=seen.__getitem__) if seen else next(iter(errors), None)


def _model_state(model: Model) -> State:
    return learner_state.save(model) if isinstance(model, RlsLearner) else model.state()
