"""What the bank asks of a learner, and which one a configured name and a feature set make.

``rls`` on ``bsr_ard`` determines relevance itself. ``river:residual`` is no learner of its own: it is part of what a
target publishes (online/target/published_prediction.py).
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

from online.blocks import Design
from online.features import FeatureSet
from online.river import PREFIX, RESIDUAL, RiverLearner, make
from online.rls import LearnerSettings, Prior, RelevantFit, RlsLearner
from online.rows import Floats
from online.snapshot import ModelSnapshot

RLS = "rls"
RELEVANCE_SETS = frozenset({"bsr_ard"})
"""Sets on which ``rls`` prunes."""


class Learner(Protocol):
    """One feature set on one target of one configuration.

    Attributes:
        features: columns of the blocks it is given.
        publishes: it has what a target publishes: error bars, intervals, drift, statistics that merge and donate. It is
            saved, too; another starts over with the process.
    """

    features: FeatureSet
    publishes: bool

    @property
    def started(self) -> bool:
        """Whether a prediction means anything yet."""

    def learn(self, block: Design, /) -> Floats | None:
        """Predict, score and learn rows; log(y / prediction) by published coefficients, (n,), where there are any."""

    def predict(self, block: Design) -> Floats:
        """Live prediction: microseconds, (n,)."""

    def snapshot(self) -> ModelSnapshot | None:
        """The model as published; None while there is nothing to say."""


def publishes(learner: Learner) -> TypeGuard[RlsLearner]:
    """Whether it is of the family whose coefficients a target publishes."""
    return learner.publishes


def make_learner(name: str, features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None) -> Learner:
    """A fresh learner; ``prior`` goes to the ``rls`` family only.

    Raises:
        ValueError: if there is no learner of that name.
    """
    if name == RLS:
        return make_rls(features, settings, prior)
    check_learner(name)
    return RiverLearner(name, features, settings.river_rows_per_s)


def make_rls(features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None) -> RlsLearner:
    """A fresh default learner."""
    if features.name in RELEVANCE_SETS:
        return RlsLearner(features, settings, prior, RelevantFit)
    return RlsLearner(features, settings, prior)


def check_learner(name: str) -> None:
    """Raises ValueError for a name that makes no learner. Only names that are River's own import it."""
    if name in (RLS, RESIDUAL):
        return
    if not name.startswith(PREFIX):
        raise ValueError(f"learners: {name!r} is not one of {RLS}, {PREFIX}<name>")
    make(name)
