"""What to learn with: a protocol that the sidecar's configuration fulfils, so that every default stands there, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from online.change import make_alarm
from online.features import Facts, FeatureSet, build, custom, registered
from online.river import RESIDUAL
from online.rls import LearnerSettings
from online.rows import Target

from .learners import RLS, check_learner

CUSTOM = "custom"
"""The feature set whose columns the configuration lists by their raw names."""


class BankBounds(Protocol):
    """How rows are cut into blocks, and what is held."""

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


class BankSettings(Protocol):
    """What to learn with."""

    @property
    def learners(self) -> tuple[str, ...]:
        """Among ``rls``, ``river:residual`` and ``river:<dotted name>``."""

    @property
    def feature_sets(self) -> tuple[str, ...]:
        """Registered names, or ``custom``."""

    @property
    def custom(self) -> Mapping[str, tuple[str, ...]]:
        """Raw names per target of the set ``custom``."""

    @property
    def bank(self) -> BankBounds:
        """Sizes of blocks and bounds on what the bank holds."""


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
    bounds = settings.bank
    for key, bound in (
        ("block_rows", bounds.block_rows),
        ("block_s", bounds.block_s),
        ("river_rows_per_s", bounds.river_rows_per_s),
        ("configs_max", bounds.configs_max),
    ):
        if not bound > 0:
            raise ValueError(f"{key}: expected a number > 0, got {bound}")
    make_alarm(bounds.detector)


def rates(settings: BankSettings) -> LearnerSettings:
    """Rates of the learners with the configured detector."""
    return LearnerSettings(river_rows_per_s=settings.bank.river_rows_per_s, detector=settings.bank.detector)


def feature_set(name: str, target: Target, facts: Facts, settings: BankSettings) -> FeatureSet | None:
    """The set of this name for a target; None where it has none, or needs facts that are not known."""
    if name == CUSTOM:
        names = settings.custom.get(target.value)
        return custom(target, names) if names else None
    return build(name, target, facts)
