"""One target of one configuration: its partial block, and the models with the columns each of them reads."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from online.blocks import Design, learnable_rows, rows_of_first_block
from online.constants import APART, ENGINES_MAX, MEMORY_ROWS, NOISE_ROWS, PREFERENCE, WORTH
from online.errors import Residuals
from online.features import PORTABLE, FeatureSet
from online.rls import (
    Prior,
    Replica,
    RlsLearner,
    compare_replicas,
    doubt_identified,
    join_replicas,
    merge,
)
from online.rows import Floats, RowBlock, RowOutcome, Target
from online.snapshot import ModelSnapshot, Reason, ReplicaSnapshot, TargetSnapshot
from online.state import StateError, Stateful, Tree
from online.transfer import SheetPrior

from .history import StepHistory
from .published_prediction import PublishedPrediction
from .settings import RESIDUAL, RIVER, RLS, BankSettings, river_module

if TYPE_CHECKING:
    from online.river import RiverLearner

# Guess: of cost against delay; while coefficients are young, every 32 rows move them.
WARM_UP_ROWS = 1024
# Guess: of cost against delay; a block costs the same whatever is in it.
_LONGEST = 16
_PROMPT = (Target.STEP_TIME, Target.GPU_TIME)
"""Targets whose changes are reported promptly: their blocks end after a second. The other targets change with them."""


class TargetState(Stateful):
    """See the module's docstring.

    Attributes:
        partial: rows of the block that is not complete; None where there is none.
        models: ``rls`` learners by feature set; their coefficients are published.
        river: River's learners, which predict beside them, by published name.
        published: what a target of steps publishes to predict with, where there is ``portable``.
        champion: name of the model with the lowest error; empty before the first fit.
        first_ns, last_ns: event time learned from, 0 before any row.
        received, timeless: rows, and those of them that seem to take no time.
        replicas: what each of several states knew of ``watcher`` when they were merged into this one.
        sheet_prior: what the data sheet and other configurations say of ``portable``'s step time.
    """

    SAVED = ("residuals", "champion", "first_ns", "last_ns", "received", "timeless")

    def __init__(self, target: Target, settings: BankSettings) -> None:
        self.target, self.settings = target, settings
        self.partial: RowBlock | None = None
        self.models: dict[str, RlsLearner] = {}
        self.river: dict[str, RiverLearner] = {}
        self.published: PublishedPrediction | None = None
        self.residuals, self.champion = Residuals(), ""
        self.first_ns = self.last_ns = 0
        self.received = self.timeless = 0
        self.replicas: list[Replica] = []
        self.history: StepHistory | None = None
        self.engine_names: dict[int, str] = {}
        self.sheet_prior: SheetPrior | None = None

    def add_features(self, features: FeatureSet, prior: Prior | None = None) -> None:
        """Start models on a feature set that has become available; ``prior``: of its coefficients."""
        if features.name in self.models:
            return
        self.models[features.name] = RlsLearner(features, prior, detector=self.settings.detector)
        for name in self.settings.learners:
            if name not in (RLS, RESIDUAL):
                self.river[f"{name}/{features.name}"] = river_module().RiverLearner(name.removeprefix(RIVER), features)
        if self.published is None and PORTABLE in self.models and self.target.vector == "beta":
            self.published = PublishedPrediction(features, self.settings)
        for model in self.models.values():
            model.learns_intervals = self.published is None

    def watcher(self) -> RlsLearner | None:
        """``portable``, which every consumer computes and shape factors belong to; else the first model."""
        return self.models.get(PORTABLE) or next(iter(self.models.values()), None)

    # ---------------------------------------------------------------- rows in

    def learn(self, rows: RowBlock) -> Counter[RowOutcome]:
        """Learn every block that these rows complete; what became of the rows."""
        good, outcome = learnable_rows(rows, [model.features for model in self.models.values()])
        self.received += len(rows)
        self.timeless += int(np.count_nonzero(rows.elapsed_us == 0.0))
        if not len(good):
            return outcome
        first_ns, start = int(good.end_ns.min()), 0
        self.first_ns = min(self.first_ns or first_ns, first_ns)
        self.last_ns = max(self.last_ns, int(good.end_ns.max()))
        waiting = good if self.partial is None else RowBlock.concatenate([self.partial, good])
        while (size := rows_of_first_block(waiting.end_ns[start:], *self._block_limits())) > 0:
            self._learn_block(waiting.slice(start, start + size))
            start += size
        self.partial = waiting.slice(start, len(waiting)) if start < len(waiting) else None
        return outcome

    def _block_limits(self) -> tuple[int, int]:
        """Rows and nanoseconds of a block; see the constants above."""
        watcher, rows, seconds = self.watcher(), self.settings.block_rows, self.settings.block_s
        is_young = watcher is None or watcher.rows < WARM_UP_ROWS
        block_s = seconds if self.target in _PROMPT else _LONGEST * seconds
        return min(NOISE_ROWS, rows) if is_young else rows, int(block_s * 1e9)

    def _learn_block(self, rows: RowBlock) -> None:
        """Each model learns these rows, the one that watches for changes of speed first."""
        self.champion, watcher, change = self._best(), self.watcher(), None
        for model in sorted(self.models.values(), key=lambda each: each is not watcher):
            block = Design.of(model.features, rows)
            if not len(block):
                continue
            log_factors = model.log_factors(block.cell)
            log_ratio = model.learn(block, change, is_watcher=model is watcher)
            if model is watcher:
                change = model.change
                shaped = None if log_ratio is None else log_ratio - log_factors
                self._learn_published(model, block, shaped, int(rows.end_ns[-1]))
            if log_ratio is not None and model.features.name == self.champion:
                self.residuals.learn(log_ratio)
            for other in self.river.values():
                if other.features is model.features:
                    other.learn(block)

    def _learn_published(self, watcher: RlsLearner, block: Design, log_ratio: Floats | None, end_ns: int) -> None:
        """What is published and shown learns rows that the watcher has learned, by log(y / (x beta F)), (n,)."""
        if self.published is not None:
            self.published.learn(block, log_ratio, watcher.change)
        if self.target is Target.STEP_TIME:
            self.history = self.history or StepHistory(watcher.features.names)
            self.history.learn(block, log_ratio)
            self.history.record(end_ns, watcher)

    def _best(self) -> str:
        """The champion as of now; empty before the first fit."""
        errors = {name: model.error.mean() for name, model in sorted(self.models.items()) if model.started}
        best = min(errors, key=errors.__getitem__, default="")
        kept = self.champion in errors and not errors[best] < PREFERENCE * errors[self.champion]
        return self.champion if kept else best

    def flush(self) -> None:
        """Learn the partial block as it stands."""
        if self.partial is not None:
            self._learn_block(self.partial)
            self.partial = None

    # ---------------------------------------------------------------- reading

    def flushed(self) -> TargetState:
        """A copy that has learned its partial block; itself where there is none."""
        if self.partial is None:
            return self
        copied = copy.deepcopy(self)
        copied.flush()
        # A counter must not fall, and the rest of the block may decide that this part is learned otherwise.
        copied.residuals = self.residuals
        return copied

    def snapshot(self) -> TargetSnapshot | None:
        """The target as published; None before anything is learned."""
        models, beta, model = self._models_as_published(), None, self.models.get(PORTABLE)
        if self.sheet_prior is not None and model is not None and self.sheet_prior.fits(model):
            if PORTABLE not in models:
                return self.sheet_prior.target_before()
            if (blended := self.sheet_prior.after(model, models[PORTABLE])) is not None:
                models[PORTABLE], beta = blended, np.array([feature.coefficient for feature in blended.features])
        vector, champion, watcher = self.target.vector, self._best(), self.watcher()
        if watcher is None or champion not in models:
            return None
        learner, doubts = self.models[champion], {}
        # Of a merged state the engines it was made of, else those that send here, each against the others.
        engines = self.replicas or Replica.of_engines(watcher, self.engine_names)
        replicas = compare_replicas(engines, watcher.rows if self.replicas else 0, watcher.features.names)
        if vector == "beta":
            doubts = self._doubts(watcher, replicas)
            models = {name: doubt_identified(model, next(iter(doubts), None)) for name, model in models.items()}
        if self.published is not None:
            parts = self.published.snapshot(self.models[PORTABLE], beta)
        else:
            band = learner.intervals.snapshot(by_stratum=vector == "beta")
            parts = {"interval": band, "mean_factor": learner.mean_factor()}
        return TargetSnapshot(
            vector=vector,
            unit="us",
            champion=champion,
            models=models,
            residuals=self.residuals.snapshot(),
            drift=watcher.drift.snapshot(),
            mean_us=learner.mean_us(),
            replicas=replicas,
            doubts=[*doubts.values()],
            **parts,
        )

    def _models_as_published(self) -> dict[str, ModelSnapshot]:
        models = {name: model.snapshot() for name, model in self.river.items()}
        models |= {name: model.snapshot() for name, model in self.models.items()}
        known = {name: model for name, model in sorted(models.items()) if model is not None}
        if self.published is not None and PORTABLE in known:
            known[PORTABLE] = self.published.with_errors(known[PORTABLE])
        return known

    def _doubts(self, watcher: RlsLearner, replicas: Sequence[ReplicaSnapshot]) -> dict[Reason, str]:
        """Why no coefficient of steps should be used, a clause each."""
        doubts: dict[Reason, str] = {}
        # A clock that counts in units longer than a step says that many steps take no time; those cannot be learned,
        # and what is learned of the others alone is biased, however surely.
        if self.received >= MEMORY_ROWS and self.timeless > WORTH * self.received:
            share = f"{self.timeless / self.received:.0%} of its steps seem to take no time"
            doubts[Reason.CLOCK_GRAIN] = f"the clock of its telemetry is too coarse: {share}"
        odd = [(each.engine, each.ratio) for each in replicas[:1] if each.differs and each.ratio is not None]
        if (here := watcher.drift.engines.outlier(watcher.shapes.log_y)) is not None:
            odd.append((self.engine_names.get(here[0], str(here[0])), here[1]))
        for name, ratio in odd:
            if abs(math.log(ratio)) > APART:
                clause = f"its engines disagree: engine {name} takes {ratio:.1f} × as long as the others"
                doubts[Reason.TWO_SPEEDS] = clause
        return doubts

    def name_engines(self, names: Mapping[int, str]) -> None:
        """Remember the names of engines that sent rows; beyond the bound the oldest are forgotten."""
        known = {number: name for number, name in self.engine_names.items() if number not in names} | dict(names)
        self.engine_names = dict([*known.items()][-ENGINES_MAX:])

    # ---------------------------------------------------------------- state

    def to_state(self) -> Tree:
        """For the state file; the partial block is saved, not flushed."""
        return super().to_state() | {
            "partial": None if self.partial is None else self.partial.to_state(),
            "models": {name: [list(model.features.names), model.to_state()] for name, model in self.models.items()},
            "published": None if self.published is None else self.published.to_state(),
            "replicas": [each.to_state() for each in self.replicas],
            "history": None if self.history is None else self.history.to_state(),
            "engine_names": {str(number): name for number, name in self.engine_names.items()},
        }

    def from_state(self, state: Tree) -> None:
        """Fill this fresh target; models that are not configured with the same columns are left out."""
        super().from_state(state)
        same = set()
        for name, (columns, kept) in state["models"].items():
            model = self.models.get(name)
            if model is not None and columns == [*model.features.names]:
                model.from_state(kept)
                same.add(name)
        if state["partial"] is not None:
            self.partial = RowBlock.of_state(state["partial"], self.target.vocabulary)
        if self.published is not None and PORTABLE in same and state["published"] is not None:
            self.published.from_state(state["published"])
        watcher = self.watcher()
        if watcher is not None and watcher.features.name in same:
            self.replicas = [Replica.of_state(each, len(watcher.features)) for each in state["replicas"]]
            if state["history"] is not None:
                self.history = StepHistory(watcher.features.names)
                self.history.from_state(state["history"])
        self.engine_names = {int(number): str(name) for number, name in state["engine_names"].items()}

    def add(self, other: TargetState, engines: tuple[str, str] = ("", "")) -> None:
        """Merge another state of this target, which is not used again, into this one; both are flushed first.

        ``engines``: whom this one and the other are named after. StateError if models of one name have other columns.
        """
        self.flush()
        other.flush()
        later = other.first_ns >= self.last_ns
        side_by_side = not later and other.last_ns > self.first_ns
        earlier, newest = (self, other) if later else (other, self)
        if not side_by_side and earlier.published is not None and newest.published is not None:
            earlier.published.decay(newest.models[PORTABLE].half_lives())
            earlier.published.intervals.decay(newest.published.intervals.rows)
        for name, model in self.models.items():
            theirs = other.models.get(name)
            if theirs is None:
                continue
            mine, columns = model.features.names, theirs.features.names
            if mine != columns:
                raise StateError(f"model {name!r}: {mine} cannot be merged with {columns}")
            if model is self.watcher():
                known = self.replicas or Replica.of(model, engines[0])
                self.replicas = join_replicas(known, other.replicas or Replica.of(theirs, engines[1]))
            merge(model, theirs, other_is_later=later, side_by_side=side_by_side)
        self.residuals.add(other.residuals)
        self.received += other.received
        self.timeless += other.timeless
        if self.published is not None and other.published is not None:
            self.published.add(other.published)
        self.champion = ""  # nobody's before, so that neither order gives another one
        self.history = None
        self.first_ns = min(self.first_ns or other.first_ns, other.first_ns or self.first_ns)
        self.last_ns = max(self.last_ns, other.last_ns)
