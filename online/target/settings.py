"""What to learn with: the settings as a protocol, and which learner a configured name and a feature set make.

The sidecar's configuration fulfils the protocol, so that every default stands there, once. ``river:residual`` is no
learner of its own: it is part of what a target publishes (online/target/published_prediction.py). online/river.py is
imported with the first target that has a model of River's, and nowhere else: it takes 60 MB and 0.7 s of CPU, which
neither an idle sidecar nor a command pays.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

from online.change import DETECTORS
from online.constants import VALUE_MAX
from online.features import Facts, FeatureSet, build, custom, registered
from online.rls import Prior, RlsLearner
from online.rows import Target

if TYPE_CHECKING:
    from online.river import ResidualModel, RiverLearner

RLS = "rls"
RIVER, RESIDUAL = "river:", "river:residual"
CUSTOM = "custom"
"""The feature set whose columns the configuration lists by their raw names."""

Learner = Union[RlsLearner, "RiverLearner"]
"""One feature set on one target of one configuration. What a target publishes is of the first kind alone: error bars,
intervals, drift, statistics that merge and donate. It is saved; the other starts over with the process."""


class BankSettings(Protocol):
    """What to learn with, how rows are cut into blocks, and what is held."""

    @property
    def block_rows(self) -> int:
        """Rows of a block at most."""

    @property
    def block_s(self) -> float:
        """Event time after which a block ends."""

    @property
    def detector(self) -> str:
        """Of changes of speed (online/change.py)."""

    @property
    def river_rows_per_s(self) -> float:
        """Rows per second of event time that a River model sees at most."""

    @property
    def configs_max(self) -> int:
        """Configurations learned at most."""

    @property
    def learners(self) -> tuple[str, ...]:
        """``rls`` and names of River's."""

    @property
    def feature_sets(self) -> tuple[str, ...]:
        """Registered names, or ``custom``."""

    @property
    def custom(self) -> Mapping[str, tuple[str, ...]]:
        """Raw names per target of the set ``custom``."""


def check_settings(settings: BankSettings) -> None:
    """Raises ValueError naming the first key that cannot work."""
    for name in settings.learners:
        _check_learner(name)
    if RESIDUAL in settings.learners and RLS not in settings.learners:
        raise ValueError(f"learners: {RESIDUAL} corrects what {RLS} publishes, which is not among them")
    for name in settings.feature_sets:
        if name != CUSTOM and name not in registered():
            raise ValueError(f"feature_sets: {name!r} is not one of {', '.join((*registered(), CUSTOM))}")
    for target, names in settings.custom.items():
        if target not in set(Target):
            raise ValueError(f"custom: {target!r} is not one of {', '.join(Target)}")
        custom(Target(target), names)
    for key in ("block_rows", "block_s", "river_rows_per_s", "configs_max"):
        bound = getattr(settings, key)
        if not 0 < bound <= VALUE_MAX:
            raise ValueError(f"{key}: expected a number > 0 and <= {VALUE_MAX:.0e}, got {bound}")
    if settings.detector not in DETECTORS:
        raise ValueError(f"detector: {settings.detector!r} is not one of {', '.join(DETECTORS)}")


def _check_learner(name: str) -> None:
    if name in {RLS, RESIDUAL}:
        return
    if not name.startswith(RIVER):
        raise ValueError(f"learners: {name!r} is not one of {RLS}, {RIVER}<name>")
    try:
        _river().make_regressor(name.removeprefix(RIVER))
    except ValueError as error:
        raise ValueError(f"learners: {name!r}: {error}") from error


def _river() -> Any:
    return importlib.import_module("online.river")


def make_learner(name: str, features: FeatureSet, settings: BankSettings, prior: Prior | None = None) -> Learner:
    """A fresh learner of a name that was checked; ``prior`` goes to ``rls`` only."""
    if name == RLS:
        return RlsLearner(features, prior, detector=settings.detector)
    learner: RiverLearner = _river().RiverLearner(name.removeprefix(RIVER), features, settings.river_rows_per_s)
    return learner


def make_residual(target: Target, settings: BankSettings) -> ResidualModel | None:
    """River's residual model of a target and the columns it reads; None where it has none."""
    if RESIDUAL not in settings.learners or target is not Target.STEP_TIME:
        return None
    model: ResidualModel = _river().ResidualModel(settings.river_rows_per_s)
    return model


def feature_set(name: str, target: Target, facts: Facts, settings: BankSettings) -> FeatureSet | None:
    """The set of this name for a target; None where it has none, or needs facts that are not known."""
    if name == CUSTOM:
        names = settings.custom.get(target.value)
        return custom(target, names) if names else None
    return build(name, target, facts)
