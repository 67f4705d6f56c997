"""What to learn with, and every bound of the bank; checked before anything is learned."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from online.drift import make_detector
from online.features import custom, registered
from online.rls import LearnerSettings

from .make import RLS, check_learner
from .rows import Target

DEFAULT_LEARNER = RLS
CUSTOM = "custom"


class RowOutcome(enum.StrEnum):
    """What became of a row; received = the sum over all of them."""

    LEARNED = "learned"
    NOT_FINITE = "not_finite"
    NOT_POSITIVE = "not_positive"
    OUT_OF_RANGE = "out_of_range"
    UNKNOWN_FEATURE = "unknown_feature"
    QUARANTINED = "quarantined"


class BankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the bank.

    Attributes:
        learners: ``rls``, ``rls_covariance``, ``river:linear``, ``river:residual``, ``river:quantile``,
            ``river:<dotted name>``.
        feature_sets: registered names, or ``custom``.
        live_sets: feature sets that only predict (free of sign, not published).
        custom: raw names per target of the set ``custom``.
        block_rows: rows of a block; drift and champion react once per block. 32 finds a change of speed within 64 rows;
            512 and more are for bulk replay only.
        block_ns: event time after which a block ends.
        configs_max: configurations kept; the one that learned least recently goes.
        donors_max: donor configurations kept for warm starts.
        value_max: a feature, weight or time (us) beyond this is not a measurement.
        elapsed_us_min: a time below this is not a measurement.
        rls: rates of the ``rls`` learner and its drift detector.
    """

    learners: tuple[str, ...] = (DEFAULT_LEARNER, "river:linear")
    feature_sets: tuple[str, ...] = ("portable", "physics")
    live_sets: tuple[str, ...] = ("shape",)
    custom: Mapping[str, tuple[str, ...]] = {}
    block_rows: int = 32
    block_ns: int = 1_000_000_000
    configs_max: int = 64
    donors_max: int = 64
    value_max: float = 1e12
    elapsed_us_min: float = 1e-3
    rls: LearnerSettings = LearnerSettings()

    def check(self) -> None:
        """Raises ValueError naming the first key that cannot work."""
        for name in self.learners:
            check_learner(name)
        for key in ("feature_sets", "live_sets"):
            for name in getattr(self, key):
                if name != CUSTOM and name not in registered():
                    raise ValueError(f"{key}: {name!r} is not one of {', '.join((*registered(), CUSTOM))}")
        for target, names in self.custom.items():
            if target not in set(Target):
                raise ValueError(f"custom: {target!r} is not one of {', '.join(Target)}")
            custom(Target(target), names)
        for key in ("block_rows", "block_ns", "configs_max"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}: expected an integer >= 1, got {getattr(self, key)}")
        make_detector(self.rls.drift)
