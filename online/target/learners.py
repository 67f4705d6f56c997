"""Which learner a configured name and a feature set make: the one place that knows them all.

``rls`` on ``bsr_ard`` determines relevance itself; ``river:quantile`` is three quantile models in one. All else is
the plain learner of its name.
"""

from __future__ import annotations

from online.features import FeatureSet
from online.river import PREFIX, QUANTILE, RESIDUAL, QuantileLearner, ResidualLearner, RiverLearner, make
from online.rls import ArdLearner, CovarianceLearner, LearnerSettings, Prior, RlsLearner

RLS = "rls"
COVARIANCE = "rls_covariance"
RELEVANCE_SETS = frozenset({"bsr_ard"})
"""Sets on which ``rls`` prunes."""

Model = RlsLearner | RiverLearner | ResidualLearner | CovarianceLearner


def make_learner(name: str, features: FeatureSet, settings: LearnerSettings, prior: Prior | None = None) -> Model:
    """A fresh learner; ``prior`` goes to the ``rls`` family only.

    Raises:
        ValueError: if there is no learner of that name.
    """
    if name == RLS:
        kind = ArdLearner if features.name in RELEVANCE_SETS else RlsLearner
        return kind(features, settings, prior)
    if name == COVARIANCE:
        return CovarianceLearner(features)
    if name == QUANTILE:
        return QuantileLearner(features)
    if name == RESIDUAL:
        return ResidualLearner(features)
    check_learner(name)
    return RiverLearner(name, features)


def check_learner(name: str) -> None:
    """Raises ValueError for a name that makes no learner."""
    if name in (RLS, COVARIANCE):
        return
    if not name.startswith(PREFIX):
        raise ValueError(f"learners: {name!r} is not {RLS}, {COVARIANCE} or {PREFIX}<name>")
    make(name)
