"""What to learn with: the settings as a protocol, and which learner a configured name and a feature set make.

The sidecar's configuration fulfils the protocol, so that every default stands there, once. ``rls`` on ``bsr_ard``
determines relevance itself. ``river:residual`` is no learner of its own: it is part of what a target publishes
(online/target/published_prediction.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

from online.blocks import Design
from online.change import make_alarm
from online.features import Facts, FeatureSet, build, custom, registered
from online.river import PREFIX, RESIDUAL, RiverLearner, make
from online.rls import LearnerSettings, Prior, RelevantFit, RlsLearner
from online.rows import Floats, Target
from online.snapshot import ModelSnapshot

RLS = "rls"
CUSTOM = "custom"
"""The feature set whose columns the configuration lists by their raw names."""
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


class BankSettings(Protocol):
    """What to learn with, how rows are cut into blocks, and what is held."""

    @property
    def block_rows(self) -> int:
        """Rows of a block at most; where something may be changing it is learned in short pieces (target_state.py)."""

    @property
    def block_s(self) -> float:
        """Event time after which a block ends."""

    @property
    def detector(self) -> str:
        """Of changes of speed (online/change.py)."""

    @property
    def river_rows_per_s(self) -> float:
        """Rows per second of event time that each of River's models sees; it bounds what they cost."""

    @property
    def configs_max(self) -> int:
        """Configurations kept; the one that learned least recently goes."""

    @property
    def learners(self) -> tuple[str, ...]:
        """Among ``rls``, ``river:residual`` and ``river:<dotted name>``."""

    @property
    def feature_sets(self) -> tuple[str, ...]:
        """Registered names, or ``custom``."""

    @property
    def custom(self) -> Mapping[str, tuple[str, ...]]:
        """Raw names per target of the set ``custom``."""


def check_settings(settings: BankSettings) -> None:
    """Raises ValueError naming the first key that cannot work."""
    for name in settings.learners:
        check_learner(name)
    if RESIDUAL in settings.learners and RLS not in settings.learners:
        raise ValueError(f"learners: {RESIDUAL} corrects what {RLS} publishes, which is not among them")
    for name in settings.feature_sets:
        if name != CUSTOM and name not in registered():
            raise ValueError(f"feature_sets: {name!r} is not one of {', '.join((*registered(), CUSTOM))}")
    for target, names in settings.custom.items():
        if target not in set(Target):
            raise ValueError(f"custom: {target!r} is not one of {', '.join(Target)}")
        custom(Target(target), names)
    for key, bound in (
        ("block_rows", settings.block_rows),
        ("block_s", settings.block_s),
        ("river_rows_per_s", settings.river_rows_per_s),
        ("configs_max", settings.configs_max),
    ):
        if not bound > 0:
            raise ValueError(f"{key}: expected a number > 0, got {bound}")
    make_alarm(settings.detector)


def rates(settings: BankSettings) -> LearnerSettings:
    """Rates of the learners with the configured detector."""
    return LearnerSettings(river_rows_per_s=settings.river_rows_per_s, detector=settings.detector)


def feature_set(name: str, target: Target, facts: Facts, settings: BankSettings) -> FeatureSet | None:
    """The set of this name for a target; None where it has none, or needs facts that are not known."""
    if name == CUSTOM:
        names = settings.custom.get(target.value)
        return custom(target, names) if names else None
    return build(name, target, facts)
