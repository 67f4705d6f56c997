"""What a target publishes by its data sheet, before there are rows and where these leave the split of costs open."""

from __future__ import annotations

from typing import Protocol

from online.blocks import Design
from online.features import FeatureSet, build
from online.rls import RowWeights
from online.rows import Target
from online.snapshot import TargetSnapshot
from online.transfer import SheetEstimate, SheetPrior

from .learners import RLS, Learner, publishes
from .published_prediction import SHAPED
from .settings import BankSettings

Columns = tuple[tuple[str, str], ...]


def columns_of(features: FeatureSet) -> Columns:
    """Names and units."""
    return tuple((column.name, column.unit) for column in features.columns)


def told_by_sheet(prior: SheetPrior | None, learner: Learner | None) -> SheetEstimate | None:
    """What is published in place of what ``portable`` learned; None where that stands."""
    if prior is None or learner is None or not publishes(learner):
        return None
    return prior.after(learner)


class ToldBySheet(Protocol):
    """A target that may have a sheet; it may come later."""

    sheet_prior: SheetPrior | None


def weights_by_sheet(told: ToldBySheet, held: Design) -> RowWeights | None:
    """How operating points weigh the first rows of ``portable``; None = as its first fit does."""
    return None if told.sheet_prior is None else told.sheet_prior.weights_of(held)


def foretold(prior: SheetPrior | None, settings: BankSettings) -> TargetSnapshot | None:
    """The step time of a configuration of which no row was learned; None without a sheet."""
    features = build(SHAPED, Target.STEP_TIME, {})
    if prior is None or features is None or SHAPED not in settings.feature_sets or RLS not in settings.learners:
        return None
    told = prior.before()
    models = {name: model for name, model in prior.systems_before().items() if name in settings.feature_sets}
    models[SHAPED] = told.model(None, columns_of(features))
    return TargetSnapshot(vector="beta", unit="us", champion=SHAPED, models=models, interval=told.interval())
