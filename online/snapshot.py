"""The snapshot: what readers see, schema ``tracefit.snapshot/1``.

Immutable, JSON, deterministic bytes. More keys may be added within /1, none removed. A coefficient without data and
without a prior is absent: its feature is not in the list. Never NaN, never a placeholder.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

SCHEMA = "tracefit.snapshot/1"


class Reason(StrEnum):
    """Why a coefficient should not be used alone; docs/learning.md says what each means."""

    FEW_ROWS = "few_rows"
    COLLINEAR = "collinear"
    ONE_SIZE = "one_size"
    WIDE = "wide"
    CLOCK_GRAIN = "clock_grain"
    TWO_SPEEDS = "two_speeds"
    POOR_FIT = "poor_fit"
    HIDDEN_PREFIX_HITS = "hidden_prefix_hits"
    SAMPLED = "sampled"
    UNCOUNTED = "uncounted"
    DERIVED = "derived"


class FeatureSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One coefficient of one model; ``unit`` is the coefficient's, e.g. us/token.

    ``stderr``: under the load that it was learned from; none where it trades with other columns (vif > 10).
    ``form_error``: how far it may move when the load changes, an indication, in ``stderr`` below 1,280 rows only.
    ``vif``: variance inflation by the other columns. ``mean``: of the feature itself, per step or request, over the
    remembered rows. ``reason``: why it should not be used alone. See docs/learning.md.
    """

    name: str
    unit: str
    coefficient: float
    status: str
    stderr: float | None = None
    vif: float | None = None
    mean: float | None = None
    reason: Reason | None = None
    form_error: float | None = None


class ErrorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Prequential (predict, then learn) relative error, exponentially forgotten; ratios, not per cent."""

    mape: float
    median_ape: float
    p90_ape: float


class ModelSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One learner on one feature set.

    ``error`` is of the published coefficients alone, ``prediction_error`` of what the target publishes to predict with:
    their product with its shape factors, its level, and its correction while that is active, each row by what was known
    before it. ``shaped_error`` is of the product with shape factors alone, which a reader of a file computes.
    ``covariance``: of the features' errors, one row per feature in their order; the error of a sum x beta is
    sqrt(x' covariance x), much less than its parts' where columns trade. A model that only predicts lists no features;
    of River's, ``rows`` are those it sees.
    """

    features: list[FeatureSnapshot]
    rows: int
    effective_rows: float
    condition_number: float | None = None
    error: ErrorSnapshot | None = None
    prediction_error: ErrorSnapshot | None = None
    shaped_error: ErrorSnapshot | None = None
    covariance: list[list[float]] = []


class IntervalSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Quantiles of observed / predicted; ``strata`` per operating point, named like ``decode:8-15``."""

    p10: float
    p50: float
    p90: float
    strata: dict[str, tuple[float, float, float]] = {}


class ShapeFactorSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step of one batch shape takes per x beta of ``portable``; shrunk already; ``rows`` stand behind it.

    ``usual``: prefill tokens, requests, tokens of decode context and microseconds of such a step, not shrunk; none
    while factors are not applied, since ``mean_factor`` counts the stalls of all shapes then.
    """

    factor: float
    rows: float
    usual: tuple[float, float, float, float] | None = None


class LevelSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """By how much the last steps of one phase took longer than x beta F, as a factor; 1 where no level is the best.

    ``half_life_rows``: of the exponentially weighted mean that is chosen by its error; None with no level. ``rows``
    were learned; the newest ended at ``last_row_unix_nano``, event time. It tells of the seconds after that.
    """

    factor: float
    rows: int
    last_row_unix_nano: int
    half_life_rows: int | None = None


class CorrectionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What River's regression adds to x beta F times the level, from what no coefficient is about (queue, KV usage).

    Only while it is ``active``. ``factor`` is what the prediction of the last row that it saw was multiplied by, 1
    while it is not. ``rows`` by what became of them: learned, or thinned (a bounded number per second is seen).
    """

    learner: str
    active: bool
    factor: float
    rows: dict[str, int]


class SeenSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What was learned from: lowest and highest value per step of each column, and the batch shapes."""

    features: dict[str, tuple[float, float]]
    cells: list[str]


class ResidualSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Observed / predicted of every row since learning began, each predicted by the champion before it was learned.

    ``rows`` per class: up to and including each of ``ratio_bounds``, and beyond the last. They and ``ratio_sum`` only
    grow, also across restarts; a ratio beyond 10 counts as 10.
    """

    ratio_bounds: list[float]
    rows: list[int]
    ratio_sum: float


class DriftSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Confirmed changes of speed: how many, when the last one began, within how many seconds, and new ÷ old time.

    ``term``: what moved in the last one: ``all`` terms alike, ``decode`` (all but prefill), ``not_prefill`` (decode, or
    one column of it), or one column; empty where that is not known. ``added``: microseconds more per unit of that
    column; of the others, the share of what they took.
    """

    last_unix_nano: int | None
    gain: float | None
    count: int
    last_within_s: float | None = None
    term: str = ""
    added: float | None = None


class ReplicaSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of several engines that send to one sidecar, or whose states were merged, against the others.

    ``ratio``: its time per time of the others, the median of theirs, for the same work. ``differs``: by more than 5 %
    and by more than three standard errors of the ratio, which the others' scatter is in. ``term``, ``added``: of one
    that differs, as of a change of speed: what takes longer, or less, than the others' does.
    """

    engine: str
    rows: int
    differs: bool
    ratio: float | None = None
    stderr: float | None = None
    term: str = ""
    added: float | None = None


class TargetSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything known about one target of one configuration.

    ``champion`` is the model with coefficients that has the lowest prequential error; another one takes its place where
    its error is 5 % lower. ``mean_factor`` (mean time per robustly predicted time: stalls) stands beside the
    coefficients and is never folded into them. ``shape_factors``: of the coefficients of ``portable``, by batch shape
    (``decode:3``; ``prefill:8-15:64-90`` is 8 to 15 requests with 64 to 90 prefill tokens); a shape that is not listed
    has 1, as all have while they predict worse than none would (``shape_factors_applied`` is false). Where they are,
    ``interval`` and ``mean_factor`` are relative to x beta F. ``level``: by phase, ``decode`` (steps without prefill)
    and ``prefill``, what x beta F is multiplied by for a step of now. ``context_us_per_token``: what a token of decode
    context costs among steps of about one size without prefill, where that is known to a tenth; unlike the coefficient
    it stands in for nothing else. ``step_ahead_us``: how much of the intercept of ``api_queueing`` is a step that the
    engine schedules ahead, 0 where it schedules none, absent where nobody knows; who simulates that step takes it off.
    ``replicas``: the engines that sent rows in the last ten minutes, where several did; of a state that was merged,
    those it was made of, as of then.
    ``doubts``: why none of its coefficients should be used, one clause each.
    """

    vector: str
    unit: str
    champion: str
    models: dict[str, ModelSnapshot]
    interval: IntervalSnapshot | None = None
    shape_factors: dict[str, ShapeFactorSnapshot] = {}
    shape_factors_applied: bool = True
    level: dict[str, LevelSnapshot] = {}
    correction: CorrectionSnapshot | None = None
    seen: SeenSnapshot | None = None
    residuals: ResidualSnapshot | None = None
    drift: DriftSnapshot | None = None
    mean_us: float | None = None
    mean_factor: float | None = None
    context_us_per_token: float | None = None
    step_ahead_us: float | None = None
    replicas: list[ReplicaSnapshot] = []
    doubts: list[str] = []


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One emitting engine process: its scheduling mode (sync, async, unknown) and newest step id."""

    instance: str
    scheduling: str
    last_step: int


class ConfigSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One configuration: engines with equal identity share its coefficients.

    ``sources`` says where each fact of ``config`` is from, ``cannot_derive`` what is missing for the feature sets that
    need the model's and the GPU's sheet. ``quarantined``: its learner raised and why; it has no targets until a
    restart. ``doubts``: why nothing it answers should be used, one clause each; empty where nothing speaks against it.
    ``prefix_hits_hidden``: the telemetry counts prompt tokens that the prefix cache had as if they were computed.
    ``last_heard_unix_nano``: time of the newest event or page of any of its engines, by their clocks, whether a row
    was learned from it or not; 0 of merged states and of recordings, where nobody is alive. ``replaced_by``: the
    configuration that its server sends since it was started again; empty while one of its engines may be alive.
    """

    config_id: str
    config: dict[str, str | int | float | bool]
    engines: list[EngineSnapshot]
    telemetry: str
    targets: dict[str, TargetSnapshot]
    sources: dict[str, str] = {}
    cannot_derive: list[str] = []
    quarantined: str = ""
    doubts: list[str] = []
    prefix_hits_hidden: bool = False
    last_heard_unix_nano: int = 0
    replaced_by: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One generation; swapped by reference, never edited."""

    generation: int
    created_unix_nano: int
    tracefit_version: str
    configs: list[ConfigSnapshot]
    schema: str = SCHEMA

    def to_json(self) -> bytes:
        """Deterministic bytes: equal snapshots give equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def from_json(data: bytes) -> Snapshot:
        """Read a snapshot; unknown keys are ignored, another schema raises ValueError."""
        snapshot = msgspec.json.decode(data, type=Snapshot)
        if snapshot.schema != SCHEMA:
            raise ValueError(f"schema {snapshot.schema!r} is not {SCHEMA!r}")
        return snapshot
