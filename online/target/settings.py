"""What to learn with: the settings as a protocol, and the feature set that a configured name means.

The sidecar's configuration fulfils the protocol, so that every default stands there, once. ``river:residual`` is no
learner of its own: it is part of what a target publishes (online/target/published_prediction.py). online/river.py is
imported with the first target that has a model of River's, and nowhere else: it takes 60 MB and 0.7 s of CPU, which
neither an idle sidecar nor a command pays.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from online.change import DETECTORS
from online.features import Facts, FeatureSet, build, custom, registered
from online.rows import Target

RLS = "rls"
RIVER, RESIDUAL = "river:", "river:residual"
CUSTOM = "custom"
"""The feature set whose columns the configuration lists by their raw names."""


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
    if RLS not in settings.learners:
        raise ValueError(f"learners: {RLS} is not among them, whose coefficients are published")
    for name in settings.feature_sets:
        if name != CUSTOM and name not in registered():
            raise ValueError(f"feature_sets: {name!r} is not one of {', '.join((*registered(), CUSTOM))}")
    for target, names in settings.custom.items():
        if target not in set(Target):
            raise ValueError(f"custom: {target!r} is not one of {', '.join(Target)}")
        custom(Target(target), names)
    if settings.detector not in DETECTORS:
        raise ValueError(f"detector: {settings.detector!r} is not one of {', '.join(DETECTORS)}")


def _check_learner(name: str) -> None:
    if name in {RLS, RESIDUAL}:
        return
    if not name.startswith(RIVER):
        raise ValueError(f"learners: {name!r} is not one of {RLS}, {RIVER}<name>")
    try:
        river_module().make_regressor(name.removeprefix(RIVER))
    except ValueError as error:
        raise ValueError(f"learners: {name!r}: {error}") from error


def river_module() -> Any:
    """online/river.py, imported when it is first asked for."""
    return importlib.import_module("online.river")


def feature_set(name: str, target: Target, facts: Facts, settings: BankSettings) -> FeatureSet | None:
    """The set of this name for a target; None where it has none, or needs facts that are not known."""
    if name == CUSTOM:
        names = settings.custom.get(target.value)
        return custom(target, names) if names else None
    return build(name, target, facts)
