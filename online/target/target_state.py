"""One target of one configuration: its partial block, and the models with the columns each of them reads."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from online.blocks import Cutter, Design
from online.change import ENGINES_MAX, Speed, differs
from online.constants import HALF_LIFE_STEPS, NOISE_ROWS, PREFERENCE, START_ROWS, TENTH
from online.errors import Residuals
from online.features import FeatureSet
from online.river import CONTEXT, RESIDUAL
from online.rls import (
    JACKKNIFE_ROWS,
    Prior,
    Replica,
    RlsLearner,
    as_far_as_it_fits,
    compared,
    joined,
    merge,
    replica_of,
)
from online.rows import Floats, Quality, RowBlock, RowOutcome, Target
from online.snapshot import ErrorSnapshot, IntervalSnapshot, ModelSnapshot, Reason, TargetSnapshot
from online.state import StateError, Stateful, Tree
from online.transfer import SheetEstimate, SheetPrior

from .design_matrix import DesignMatrix
from .history import StepHistory
from .published_prediction import SHAPED, PublishedPrediction, make_published
from .settings import RLS, BankSettings, Learner, make_learner, publishes, rates

PriorFor = Callable[[FeatureSet], Prior | None]


# Guess: of cost against delay.
YOUNG_ROWS = 1024
"""While coefficients are young every row moves them, and they are solved after each 32 of them."""
# Guess.
_REQUESTS_LONGER = 16
"""Blocks of requests may last so many times longer: they are few, and a block costs the same whatever is in it."""
# Guess.
TIMELESS_MAX = 0.05
"""Beyond it the rest is no sample of all steps; two stamps that swapped places are a few in a thousand."""


@dataclass
class WindowRows(Stateful):
    """The last 512 rows of a target that is learned from windows between scrapes alone: its error bars rest on them.

    As soon as a row tells of single steps or requests, they are forgotten for good, and the learner's own error bars
    hold.
    """

    SAVED = ("finer",)

    rows: Design | None = None
    finer: bool = False

    def to_state(self) -> Tree:
        """See Stateful."""
        return super().to_state() | {"rows": None if self.rows is None else self.rows.to_state()}

    def from_state(self, state: Tree) -> None:
        """See Stateful."""
        super().from_state(state)
        self.rows = None if state["rows"] is None else Design.of_state(state["rows"])

    def learn(self, design: Design, *, windows: bool) -> None:
        """Remember rows, or that there are finer ones."""
        if self.finer:
            return
        if not windows:
            self.rows, self.finer = None, True
            return
        rows = design if self.rows is None else Design.concatenate([self.rows, design])
        self.rows = rows.slice(max(0, len(rows) - JACKKNIFE_ROWS), len(rows))

    def add(self, other: WindowRows, *, other_is_later: bool) -> None:
        """Rows of both, the later ones last."""
        self.finer |= other.finer
        parts = [self.rows, other.rows] if other_is_later else [other.rows, self.rows]
        held = [part for part in parts if part is not None]
        self.rows = None
        if held and not self.finer:
            rows = Design.concatenate(held)
            self.rows = rows.slice(max(0, len(rows) - JACKKNIFE_ROWS), len(rows))

    def widen(self, columns: int) -> None:
        """Give the rows more columns, which they do not know: NaN."""
        if self.rows is not None:
            self.rows = self.rows.widened(columns)


class ClockGrain(Stateful):
    """Is the clock of the telemetry fine enough for these steps?

    A clock that counts in units longer than a step says that many steps take no time. Those rows cannot be learned, and
    what is learned of the others alone is biased, however surely. Rows are counted one by one, of this window and of
    the one before, so that it does not matter in which pieces they come.
    """

    SAVED = ("rows", "timeless", "rows_before", "timeless_before")

    def __init__(self) -> None:
        self.rows = self.timeless = self.rows_before = self.timeless_before = 0

    def learn(self, elapsed_us: Floats) -> None:
        """The times of rows, those that cannot be learned included, (n,)."""
        start = 0
        while start < len(elapsed_us):
            part = elapsed_us[start : start + HALF_LIFE_STEPS - self.rows]
            start += len(part)
            self.rows += len(part)
            self.timeless += int(np.count_nonzero(part == 0.0))
            if self.rows == HALF_LIFE_STEPS:
                self.rows_before, self.timeless_before = self.rows, self.timeless
                self.rows = self.timeless = 0

    def add(self, other: ClockGrain) -> None:
        """Rows of both, as those of windows that are over."""
        self.rows_before += self.rows + other.rows + other.rows_before
        self.timeless_before += self.timeless + other.timeless + other.timeless_before
        self.rows = self.timeless = 0

    def doubts(self) -> dict[Reason, str]:
        """The clause that says that what is learned is biased by what is left out, where it is."""
        rows, timeless = self.rows + self.rows_before, self.timeless + self.timeless_before
        if rows < START_ROWS or timeless <= TIMELESS_MAX * rows:
            return {}
        clause = f"the clock of its telemetry is too coarse: {timeless / rows:.0%} of its steps seem to take no time"
        return {Reason.CLOCK_GRAIN: clause}


class TargetState(Stateful):
    """See the module's docstring.

    Attributes:
        matrix: feature sets and their columns.
        models: learners by published name.
        published: the prediction of a step with shape factors, corrected; None for targets without shapes, or without
            ``portable``.
        champion: name of the published model with the lowest error; empty before the first fit.
        first_ns, last_ns: event time learned from, 0 before any row.
        replicas: by model, what each of several states knew when they were merged into this one.
        history: the last rows and the last day, of steps only.
        clock: how many rows seem to take no time.
        engine_names: of the engines that sent rows lately, by the numbers that rows bear.
        sheet_prior: what the data sheet and other configurations say of ``portable``'s step time.
        left_out: models of a state that are not configured with the same columns.
        blocks_learned: how often something was learned that a reader is told of.
    """

    SAVED = ("residuals", "windows", "champion", "first_ns", "last_ns", "clock")

    def __init__(self, target: Target, settings: BankSettings) -> None:
        self.target = target
        self.settings = settings
        longer = 1 if target.vector == "beta" else _REQUESTS_LONGER
        self.cutter = Cutter(NOISE_ROWS, int(longer * settings.block_s * 1e9))
        self.matrix = DesignMatrix(target)
        self.models: dict[str, Learner] = {}
        self.residuals, self.windows = Residuals(), WindowRows()
        self.published: PublishedPrediction | None = None
        self.champion = ""
        self.first_ns = self.last_ns = 0
        self.replicas: dict[str, list[Replica]] = {}
        self.clock = ClockGrain()
        self.engine_names: dict[int, str] = {}
        self.history = StepHistory(kept=target is Target.STEP_TIME)
        self.sheet_prior: SheetPrior | None = None
        self.blocks_learned = 0
        self.left_out: list[str] = []

    def offer(self, features: FeatureSet, prior_for: PriorFor) -> None:
        """Start models on a feature set that has become available."""
        if features.name in self.matrix.sets:
            return
        self.matrix.add(features)
        for learner in [each for each in self.settings.learners if each != RESIDUAL]:
            key = features.name if learner == RLS else f"{learner}/{features.name}"
            prior = prior_for(features) if learner == RLS else None
            self.models[key] = make_learner(learner, features, rates(self.settings), prior)
        if self.published is None and SHAPED in self.models and self.target.vector == "beta":
            self.published = make_published(features, self.settings)
            if self.published.residual is not None:
                self.matrix.add(CONTEXT, fitted=False)
        for model in self.publishers():
            model.learns_intervals = self.published is None
        self.cutter.widen(self.matrix.width)
        self.windows.widen(self.matrix.width)

    def publishers(self) -> Iterator[RlsLearner]:
        """Learners whose coefficients are published, or predict by the same statistics."""
        return filter(publishes, self.models.values())

    # ---------------------------------------------------------------- rows in

    def learn(self, rows: RowBlock) -> Counter[RowOutcome]:
        """Cut rows into blocks and learn every block that is complete; what became of the rows."""
        design, outcome = self.matrix.evaluate(rows)
        self.clock.learn(rows.elapsed_us)
        if not len(design):
            return outcome
        windows = int(rows.quality.min()) == Quality.METRICS  # the poorest, of all rows
        self.blocks_learned += windows or self.windows.rows is not None
        self.windows.learn(design, windows=windows)
        first_ns = int(design.end_ns.min())
        self.first_ns = min(self.first_ns, first_ns) if self.first_ns else first_ns
        self.last_ns = max(self.last_ns, int(design.end_ns.max()))
        self._size_blocks()
        for block in self.cutter.push(design):
            self._learn_block(block)
            self._size_blocks()
        return outcome

    def _size_blocks(self) -> None:
        watcher, rows = self.watcher(), self.settings.block_rows
        young = watcher is None or watcher.rows < YOUNG_ROWS
        self.cutter.block_rows = min(NOISE_ROWS, rows) if young else rows

    def _learn_block(self, block: Design) -> None:
        """All models learn these rows, the one that watches for changes of speed first."""
        self.blocks_learned += 1
        views = self.matrix.views(block)
        champion, watcher = self._predictor(), self.watcher()
        context = None if self.published is None else self.published.context_of(block, self.matrix)
        speed = None
        if watcher is not None:
            view = views[watcher.features.name]
            speed = self._learn_watched(watcher, view, context, is_champion=watcher is champion)
        for model in self.models.values():
            view = views[model.features.name]
            if model is watcher or not len(view):
                continue
            log_ratio = model.learn(view, speed) if publishes(model) else model.learn(view)
            if model is champion and log_ratio is not None:
                self.residuals.learn(log_ratio)
        self.history.record(int(block.end_ns[-1]), watcher, self.published)

    def _learn_watched(self, watcher: RlsLearner, view: Design, context: Floats | None, *, is_champion: bool) -> Speed:
        """What the watcher finds goes for all models of the target."""
        if not len(view):
            return watcher.drift.unchanged()
        log_factors = watcher.log_factors(view.cell)
        log_ratio = watcher.learn(view)
        if is_champion and log_ratio is not None:
            self.residuals.learn(log_ratio)
        speed = watcher.speed or watcher.drift.unchanged()
        shaped = None if log_ratio is None else log_ratio - log_factors
        if self.published is not None and watcher is self.models[SHAPED]:
            self.published.learn(view, context, shaped, speed)
        self.history.learn(watcher, view, shaped, speed.verdict)
        return speed

    def watcher(self) -> RlsLearner | None:
        """``portable``, which every consumer computes and shape factors belong to; else the first that publishes."""
        model = self.models.get(SHAPED)
        return model if model is not None and publishes(model) else next(self.publishers(), None)

    def _predictor(self) -> RlsLearner | None:
        """The published champion as of now; None before the first fit."""
        errors = {
            name: model.error.mean()
            for name, model in sorted(self.models.items())
            if publishes(model) and model.started
        }
        if not errors:
            return None
        best = min(errors, key=errors.__getitem__)
        if self.champion not in errors or errors[best] < PREFERENCE * errors[self.champion]:
            self.champion = best
        model = self.models[self.champion]
        return model if publishes(model) else None

    def flush(self) -> None:
        """Learn the partial block as it stands."""
        if len(self.cutter):
            self._learn_block(self.cutter.flush())

    # ---------------------------------------------------------------- reading

    def flushed(self) -> TargetState:
        """A copy that has learned its partial block."""
        copied = copy.deepcopy(self)
        copied.flush()
        # A counter must not fall, and the rest of the block may decide that this part is learned otherwise.
        copied.residuals = self.residuals
        return copied

    def snapshot(self) -> TargetSnapshot | None:
        """None while there is nothing to say."""
        models: dict[str, ModelSnapshot] = {}
        told = self._by_sheet()
        for name, model in sorted(self.models.items()):
            snapshot = model.snapshot()
            if snapshot is not None:
                if name == SHAPED and self.published is not None:
                    snapshot = self.published.with_errors(snapshot)
                if self.windows.rows is not None and publishes(model):
                    snapshot = model.of_windows(snapshot, self.matrix.view(self.windows.rows, model.features.name))
                models[name] = snapshot
        if told is not None and self.sheet_prior is not None:
            if SHAPED not in models:
                return self.sheet_prior.target_before(self.settings.feature_sets)
            models[SHAPED] = told.model(models[SHAPED])
        champion = _champion(self.champion, models, self.models)
        if champion is None:
            return None
        watcher = self.watcher()
        learner, vector = self.models[champion], self.target.vector
        doubts = {}
        if vector == "beta":
            doubts = self.clock.doubts() | self._disagreement(watcher)
            models = {name: as_far_as_it_fits(model, next(iter(doubts), None)) for name, model in models.items()}
        if not publishes(learner):
            return TargetSnapshot(vector=vector, unit="us", champion=champion, models=models)
        set_name, names = ("", ()) if watcher is None else (watcher.features.name, watcher.features.names)
        merged = compared(self.replicas.get(set_name, []), learner.rows, names)
        target = TargetSnapshot(
            vector=vector,
            unit="us",
            champion=champion,
            models=models,
            residuals=self.residuals.snapshot(),
            drift=None if watcher is None else watcher.drift.snapshot(watcher.shapes),
            mean_us=learner.mean_us(),
            replicas=merged.replicas,
            **self._shape_parts(learner, None if told is None else told.beta),
            doubts=[*doubts.values()],
        )
        return _as_far_as_engines_agree(target, merged.spread)

    def _by_sheet(self) -> SheetEstimate | None:
        """What is published in place of what ``portable`` learned; None where that stands."""
        model = self.models.get(SHAPED)
        return self.sheet_prior.after(model) if self.sheet_prior and model and publishes(model) else None

    def _disagreement(self, watcher: RlsLearner | None) -> dict[Reason, str]:
        odd = None if watcher is None else watcher.drift.odd_engine(watcher.shapes)
        if odd is None or not differs(odd):
            return {}
        name = self.engine_names.get(odd.number, str(odd.number))
        clause = f"its engines disagree: engine {name} takes {odd.ratio:.1f} × as long as the others"
        return {Reason.TWO_SPEEDS: clause}

    def name_engines(self, names: Mapping[int, str]) -> None:
        """Of rows that came; those heard of longest ago are forgotten."""
        known = {number: name for number, name in self.engine_names.items() if number not in names} | dict(names)
        self.engine_names = dict([*known.items()][-ENGINES_MAX:])

    def _shape_parts(self, champion: RlsLearner, beta: Floats | None) -> dict[str, Any]:
        """Shape factors, and what is relative to the prediction by them; by the champion where there are none."""
        published, model = self.published, self.models.get(SHAPED)
        if published is not None and model is not None and publishes(model):
            return published.snapshot(model, beta)
        interval = champion.intervals.snapshot(by_stratum=self.target.vector == "beta")
        return {"interval": interval, "mean_factor": champion.mean_factor()}

    # ---------------------------------------------------------------- state

    def to_state(self) -> Tree:
        """For the state file; the partial block is saved, not flushed."""
        pending = self.cutter.pending()
        return super().to_state() | {
            "sets": [[name, [*columns]] for name, columns in self.matrix.layout()],
            "pending": None if pending is None else pending.to_state(),
            "models": {name: model.to_state() for name, model in self.models.items() if publishes(model)},
            "published": None if self.published is None else self.published.to_state(),
            "replicas": {name: [each.to_state() for each in own] for name, own in self.replicas.items()},
            "course": self.history.course.to_state(),
            "engine_names": {str(number): name for number, name in self.engine_names.items()},
        }

    def from_state(self, state: Tree) -> None:
        """Fill this fresh target; models that are not configured with the same columns are left out."""
        super().from_state(state)
        same, width = self.matrix.same_columns(state["sets"])
        for name, kept in state["models"].items():
            model = self.models.get(name)
            if model is not None and publishes(model) and name.rpartition("/")[2] in same:
                model.from_state(kept)
            else:
                self.left_out.append(name)
        if state["pending"] is not None:
            self.cutter.restore(self.matrix.rearranged(Design.of_state(state["pending"]), same, width))
        if self.windows.rows is not None:
            self.matrix.rearranged(self.windows.rows, same, width)
        if self.published is not None and SHAPED in same and state["published"] is not None:
            self.published.from_state(state["published"])
        self.replicas = {
            name: [Replica.of_state(each, len(self.matrix.sets[name][0])) for each in own]
            for name, own in state["replicas"].items()
            if name in same
        }
        self.history.course.from_state(state["course"])
        self.engine_names = {int(number): str(name) for number, name in state["engine_names"].items()}


def merge_target(into: TargetState, other: TargetState, engines: tuple[str, str] = ("", "")) -> None:
    """Add what another state of a target knows; ``other`` is used up.

    Args:
        into: both are flushed first.
        other: of the same target.
        engines: whom the one and the other are named after where they differ.

    Raises:
        StateError: models of one name have other columns.
    """
    into.flush()
    other.flush()
    later = other.first_ns >= into.last_ns
    side_by_side = not later and other.last_ns > into.first_ns
    watched = SHAPED if SHAPED in into.models else next((model.features.name for model in into.publishers()), None)
    for name, model in into.models.items():
        theirs = other.models.get(name)
        if theirs is None or not publishes(model) or not publishes(theirs):
            continue
        if model.features.names != theirs.features.names:
            raise StateError(f"model {name!r}: {model.features.names} cannot be merged with {theirs.features.names}")
        if name == watched:
            mine = into.replicas.get(name) or _as_replicas(model, engines[0])
            into.replicas[name] = joined(mine, other.replicas.get(name) or _as_replicas(theirs, engines[1]))
        merge(model, theirs, other_is_later=later, side_by_side=side_by_side)
    into.residuals.add(other.residuals)
    into.clock.add(other.clock)
    if into.published is not None and other.published is not None:
        into.published.add(other.published)
    into.champion = ""  # nobody's before, so that neither order gives another one
    into.windows.add(other.windows, other_is_later=later)
    into.history.course.add(other.history.course)
    into.first_ns = min(into.first_ns or other.first_ns, other.first_ns)
    into.last_ns = max(into.last_ns, other.last_ns)


def _as_replicas(model: RlsLearner, engine: str) -> list[Replica]:
    """A state that was not merged before is one replica."""
    replica = replica_of(model, engine)
    return [] if replica is None else [replica]


def succeed_target(new: TargetState, old: TargetState) -> None:
    """A configuration changed: shape factors and course of the new one begin with the old one's."""
    new.history.course.succeed(old.history.course, old.last_ns)
    mine, theirs = new.models.get(SHAPED), old.models.get(SHAPED)
    if mine is not None and theirs is not None and publishes(mine) and publishes(theirs):
        mine.adopt_shapes(theirs)


def _as_far_as_engines_agree(target: TargetSnapshot, spread: float) -> TargetSnapshot:
    """A merged target whose engines are so far apart, in logs: error bars and band reach as far."""
    if not spread:
        return target
    models = {}
    for name, model in target.models.items():
        features = [
            each
            if each.stderr is None
            else msgspec.structs.replace(each, stderr=math.hypot(each.stderr, each.coefficient * spread))
            for each in model.features
        ]
        apart = np.array([spread * each.coefficient for each in model.features])
        covariance = np.array(model.covariance) + np.outer(apart, apart) if model.covariance else np.empty((0, 0))
        models[name] = msgspec.structs.replace(model, features=features, covariance=covariance.tolist())
    return msgspec.structs.replace(target, models=models, interval=_widened(target.interval, TENTH * spread))


def _widened(band: IntervalSnapshot | None, wide: float) -> IntervalSnapshot | None:
    """A band whose ends are so much farther from its middle, in logs and in quadrature."""
    if band is None:
        return None

    def ends(p10: float, p50: float, p90: float) -> tuple[float, float, float]:
        low, high = math.hypot(math.log(p50 / p10), wide), math.hypot(math.log(p90 / p50), wide)
        return p50 * math.exp(-low), p50, p50 * math.exp(high)

    p10, p50, p90 = ends(band.p10, band.p50, band.p90)
    return IntervalSnapshot(p10=p10, p50=p50, p90=p90, strata={name: ends(*each) for name, each in band.strata.items()})


def _lowest(errors: dict[str, ErrorSnapshot | None]) -> str | None:
    """The name with the lowest mean error; the first one while nobody has been scored."""
    scored = {name: error.mape for name, error in errors.items() if error is not None}
    return min(scored, key=scored.__getitem__) if scored else next(iter(errors), None)


def _champion(name: str, models: dict[str, ModelSnapshot], learners: Mapping[str, Learner]) -> str | None:
    """The champion among ``rls`` models; without ``rls``, whatever has coefficients or is there."""
    if name in models:
        return name
    listed = {each: model for each, model in models.items() if model.features} or models
    published = {each: model for each, model in listed.items() if publishes(learners[each])} or listed
    return _lowest({each: model.error for each, model in published.items()})
