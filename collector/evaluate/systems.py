"""Systems learned: on a recording, frozen at the cut and prequential over all of it; on others, to see what transfers.

The learner is the bank's default, fed in blocks of 32 rows; what is scored after the cut are the published
coefficients, which then learn nothing more. The prequential pass is a live target: blocks of its sizes, and the one
watch for changes of speed that all of its models share. Rows in which a system does not know a column are scored by
nobody of that system, and counted.

Leave one out: how well what others learned predicts a configuration that taught nothing, or next to nothing. For each
capture, the donors are those of other configurations (``config``), models (``model``), GPUs (``gpu``), quantizations
(``quantization``) or just the other recordings (``workload``). The left-out capture's scored part is predicted with
nothing of its own (zero-shot), and after its first 20, 100 and 300 rows. ``portable`` is told by the data sheet and by
the overheads that donors share, as live; the other systems start from statistics pooled over donors. Variants of the
sources run beside: HFD-TL with its base frozen, RECE by its specialists, BSR-ARD by a bias and a scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from collector.config import Config
from collector.identity import IDENTITY, Fact
from online import Design, Floats, Learner, Quality, RowBlock, Target, strata_of, stratum_name
from online.features import FeatureSet, build
from online.features.systems import BSR_ARD, HFD_TL, PORTABLE, RECE, SYSTEMS, System
from online.rls import Prior, RlsLearner
from online.target import TargetState
from online.transfer import (
    HIDES_HITS,
    Donor,
    DonorPool,
    bias_and_scale,
    donor_of,
    ensemble,
    frozen,
    pool,
    specialists,
)

from .captures import Capture

BLOCK_ROWS = 32
RANK_TOLERANCE = 1e-3
LEARNING_CURVE = (20, 50, 100, 200, 500, 1000, 2000)
GOAL = 0.10

SHAPE_SUFFIX = " × shape"
"""Of a system whose prediction is multiplied by the factor of each row's batch shape."""

WATCHING = "portable"
"""The feature set that watches for changes of speed in a live target."""

NINE = ("portable", "physics", "blackbox", "roofline", "picf", "mole_rd", "hfd_tl", "bsr_ard", "rece")
"""The systems of the sources, in the order of tables."""


@dataclass(frozen=True, slots=True)
class Fit:
    """One system on one target: its columns, its learner, and what the rows could tell."""

    system: str
    features: FeatureSet
    learner: RlsLearner
    identifiable: int
    rows: int

    @property
    def columns(self) -> int:
        """Columns of the live set."""
        return len(self.features)

    def predict(self, rows: RowBlock) -> Floats:
        """See :func:`predict`."""
        return predict(self.learner, self.features, rows, shaped=self.system.endswith(SHAPE_SUFFIX))

    def interval(self, rows: RowBlock) -> tuple[Floats, Floats] | None:
        """10th and 90th percentile of observed / predicted as published for each row's stratum, (n,) each."""
        if self.system.endswith(SHAPE_SUFFIX):
            return None  # what is published is of the coefficients alone
        published = self.learner.intervals.snapshot()
        if published is None:
            return None
        pooled = (published.p10, published.p50, published.p90)
        stratum, _ = strata_of(self.features.target, rows)
        bands = np.array([published.strata.get(stratum_name(int(s)), pooled) for s in stratum]).reshape(-1, 3)
        return bands[:, 0], bands[:, 2]


def design(features: FeatureSet, rows: RowBlock) -> Design:
    """Rows as the learner takes them; those with an unknown column left out."""
    x = features.evaluate(rows)
    stratum, cell = strata_of(features.target, rows)
    steps = rows.steps.astype(np.float64)
    whole = Design(x, rows.phase, rows.elapsed_us, steps, rows.weight, stratum, cell, rows.end_ns)
    known = np.isfinite(x).all(axis=1) & np.isfinite(rows.elapsed_us) & (rows.elapsed_us > 0.0)
    return whole if known.all() else whole.take(known)


def blocks(rows: Design) -> Iterator[Design]:
    """Rows in blocks."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield rows.slice(start, min(start + BLOCK_ROWS, len(rows)))


def learn(features: FeatureSet, rows: RowBlock, prior: Prior | None = None) -> RlsLearner | None:
    """A learner fed with all rows; None when they were too few to begin."""
    learner = RlsLearner(features, prior)
    _learn_blocks(learner, features, rows)
    return learner if learner.started else None


def _learn_blocks(learner: Learner, features: FeatureSet, rows: RowBlock) -> None:
    for block in blocks(design(features, rows)):
        learner.learn(block)


def predict(learner: RlsLearner, features: FeatureSet, rows: RowBlock, *, shaped: bool = False) -> Floats:
    """Microseconds per row by the published coefficients, (n,); NaN where a column is not known.

    ``shaped``: times the factor of the row's batch shape.
    """
    beta = learner.fit.beta[: len(features)]
    with np.errstate(invalid="ignore", over="ignore"):
        x = features.evaluate(rows)
        known = np.isfinite(x).all(axis=1)
        prediction = np.full(len(rows), np.nan)
        prediction[known] = x[known] @ beta
    if shaped:
        prediction *= np.exp(learner.log_factors(strata_of(features.target, rows)[1]))
    return prediction


def build_set(system: str, target: Target, facts: dict[str, Fact]) -> FeatureSet | None:
    """Columns of a system; None where it does not apply."""
    if system.endswith(SHAPE_SUFFIX) and target.vector != "beta":
        return None
    return build(system.removesuffix(SHAPE_SUFFIX), target, facts)


def fit(system: str, target: Target, facts: dict[str, Fact], rows: RowBlock) -> Fit | None:
    """A system learned on rows; None where it does not apply or could not begin."""
    features = build_set(system, target, facts)
    if features is None or len(rows) == 0:
        return None
    model = learn(features, rows)
    if model is None:
        return None
    return Fit(system, features, model, identifiable(features, rows), len(rows))


def identifiable(features: FeatureSet, rows: RowBlock) -> int:
    """How many directions of the columns the rows excite: rank of the scaled columns, in relative units."""
    x = features.evaluate(rows)
    x = x[np.isfinite(x).all(axis=1)]
    if len(x) == 0:
        return 0
    scale = np.sqrt((x * x).mean(axis=0))
    used = scale > 0.0
    if not used.any():
        return 0
    scaled = x[:, used] / scale[used]
    values = np.linalg.svd(scaled.T @ scaled / len(x), compute_uv=False)
    return int(np.count_nonzero(np.sqrt(values) > RANK_TOLERANCE * np.sqrt(values[0])))


def ape(prediction_us: Floats, elapsed_us: Floats) -> Floats:
    """Absolute relative errors of what was predicted at all."""
    known = np.isfinite(prediction_us)
    return np.asarray(np.abs(prediction_us[known] - elapsed_us[known]) / elapsed_us[known])


def rows_to_goal(system: str, facts: dict[str, Fact], learned: RowBlock, scored: RowBlock) -> int | None:
    """The fewest first rows from which on a cold start scores 10 % or less, on a fixed grid; None if never."""
    features = build_set(system, Target.STEP_TIME, facts)
    if features is None:
        return None
    reached: int | None = None
    for count in [n for n in LEARNING_CURVE if n < len(learned)] + [len(learned)]:
        model = learn(features, learned.slice(0, count))
        shaped = system.endswith(SHAPE_SUFFIX)
        errors = (
            np.ones(1) if model is None else ape(predict(model, features, scored, shaped=shaped), scored.elapsed_us)
        )
        good = len(errors) > 0 and float(errors.mean()) <= GOAL
        reached = (reached or count) if good else None
    return reached


def prequential(system: str, facts: dict[str, Fact], rows: RowBlock) -> float | None:
    """Mean error of all rows but the first 256, each predicted by what a live target has learned before its block."""
    features, watching = (build_set(each, Target.STEP_TIME, facts) for each in (system, WATCHING))
    if features is None or watching is None:
        return None
    state = TargetState(Target.STEP_TIME, Config(learners=("rls",)))
    for each in (watching, features):
        state.offer(each, lambda _features: None)
    learner = {model.features.name: model for model in state.models.values()}[features.name]
    errors: list[Floats] = []
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows.slice(start, min(start + BLOCK_ROWS, len(rows)))
        block = design(features, part)
        if not learner.holding and len(block):
            predicted = learner.predict(block)
            if system.endswith(SHAPE_SUFFIX):
                predicted = block.x @ learner.fit.beta[: len(features)] * np.exp(learner.log_factors(block.cell))
            errors.append(np.abs(predicted - block.elapsed_us) / block.elapsed_us)
        state.learn(part)
        if start + BLOCK_ROWS >= len(rows):
            state.flush()
    return float(np.concatenate(errors).mean()) if errors else None


# --- leave one out ----------------------------------------------------------------------------------------------------

STEP = Target.STEP_TIME
FIRST_ROWS = (20, 100, 300)
_ARCHITECTURE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts")

ALL: tuple[System, ...] = (PORTABLE, *SYSTEMS)


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One system on one left-out capture; mean step errors as ratios, None = cannot be said."""

    system: str
    variant: str
    donors: int
    zero_shot: float | None = None
    after: dict[str, float] = {}
    cold: dict[str, float] = {}


def group(capture: Capture, key: str) -> str:
    """What is left out together with this capture."""
    if key == "workload":
        return capture.name
    if key in ("gpu", "quantization"):
        return str(capture.facts.get(key, "none" if key == "quantization" else capture.name))
    names = (*(IDENTITY if key == "config" else ("model",)), *_ARCHITECTURE)
    known = {name: capture.facts[name] for name in names if name in capture.facts}
    return str(sorted(known.items())) if known else capture.name


def leave_one_out(captures: Sequence[Capture], key: str, tell: Callable[[str], None]) -> dict[str, list[Transfer]]:
    """By left-out capture; captures without step rows, or without any donor, are not there."""
    usable = [capture for capture in captures if STEP in capture.full and STEP in capture.learned]
    out: dict[str, list[Transfer]] = {}
    for system in ALL:
        donors = {capture.name: _donor(system, capture) for capture in usable}
        for capture in usable:
            tell(f"{capture.name} without itself: {system.name}")
            others = [
                donor
                for other in usable
                if group(other, key) != group(capture, key) and (donor := donors[other.name]) is not None
            ]
            found = list(_variants(system, capture, others)) if others else []
            if found:
                out.setdefault(capture.name, []).extend(found)
    return out


def _donor(system: System, capture: Capture) -> Donor | None:
    features = system.live(STEP, capture.facts)
    if features is None:
        return None
    model = learn(features, capture.full[STEP].rows)
    return None if model is None else donor_of(capture.name, _facts_of(capture), model)


def _facts_of(capture: Capture) -> dict[str, Fact]:
    """With what its telemetry hides."""
    requests = bool((capture.full[STEP].rows.quality == Quality.REQUESTS).any())
    return {**capture.facts, HIDES_HITS: requests and capture.facts.get("enable_prefix_caching") is not False}


def _variants(system: System, capture: Capture, donors: Sequence[Donor]) -> Iterator[Transfer]:
    features = system.live(STEP, capture.facts)
    if features is None:
        return
    left_out = _LeftOut(system, capture, features, len(donors))
    if system is PORTABLE:
        yield from left_out.by_sheet(donors)
        return
    for variant, prior in _priors(system, capture.facts, donors, features).items():
        yield left_out.transfer(variant, prior.mean[: len(features)], functools.partial(left_out.learned, prior))
        if system is BSR_ARD:
            yield left_out.transfer("bias and scale", None, functools.partial(left_out.corrected, prior))


def _priors(system: System, facts: dict[str, Fact], donors: Sequence[Donor], features: FeatureSet) -> dict[str, Prior]:
    """What the donors of a system say together, by variant; empty if they say nothing."""
    pooled = pool(system, STEP, donors)
    prior = None if pooled is None else pooled.prior(facts)
    if prior is None:
        return {}
    priors = {"prior": prior}
    if system is HFD_TL:
        priors["frozen"] = frozen(prior, features)
    if system is RECE:
        clusters = specialists(system, STEP, donors)
        together = ensemble(facts, clusters)
        if together is not None:
            priors[f"{len(clusters)} specialists"] = together
    return priors


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A capture that is predicted by what a system learned elsewhere."""

    system: System
    capture: Capture
    features: FeatureSet
    donors: int

    @property
    def rows(self) -> RowBlock:
        """Those that are scored."""
        return self.capture.scored(STEP)

    def transfer(self, variant: str, zero_shot: Floats | None, after: Predict) -> Transfer:
        """Score coefficients without own rows, and a prediction after the first ones, beside a cold start."""
        zero = None if zero_shot is None else _mean_error(self.features.evaluate(self.rows) @ zero_shot, self.rows)
        return Transfer(
            system=self.system.name,
            variant=variant,
            donors=self.donors,
            zero_shot=zero,
            after=self._errors(after),
            cold=self._errors(functools.partial(self.learned, None)),
        )

    def _errors(self, predicted: Predict) -> dict[str, float]:
        learned, out = self.capture.learned[STEP], {}
        for count in FIRST_ROWS:
            prediction_us = predicted(learned.slice(0, min(count, len(learned))))
            error = None if prediction_us is None else _mean_error(prediction_us, self.rows)
            if error is not None:
                out[str(count)] = error
        return out

    def learned(self, prior: Prior | None, head: RowBlock) -> Floats | None:
        """By what the first rows and a prior say."""
        model = learn(self.features, head, prior=prior)
        return None if model is None else predict(model, self.features, self.rows)

    def corrected(self, prior: Prior, head: RowBlock) -> Floats | None:
        """By a prior, with the bias and the scale of the first rows."""
        mean = prior.mean[: len(self.features)]
        base = self.features.evaluate(head) @ mean
        known = np.isfinite(base)
        if not known.any():
            return None
        bias, scale = bias_and_scale(base[known], head.elapsed_us[known])
        return bias * self.rows.steps + scale * (self.features.evaluate(self.rows) @ mean)

    def by_sheet(self, donors: Sequence[Donor]) -> Iterator[Transfer]:
        """As a sidecar with these donors publishes it; nothing without a data sheet."""
        known = DonorPool(len(donors))
        known.add(donors)
        sheet = known.sheet_prior("", _facts_of(self.capture))
        if sheet is None or not len(self.rows):
            return
        x = self.features.evaluate(self.rows)

        def told(head: RowBlock) -> Floats | None:
            model = learn(self.features, head)
            found = None if model is None else sheet.after(model)
            return self.learned(None, head) if found is None else x @ found.beta

        yield self.transfer("sheet", sheet.before().beta, told)


Predict = Callable[[RowBlock], Floats | None]
"""From the first rows of a capture to microseconds of its scored ones, (n,); None where it cannot be said."""


def _mean_error(prediction_us: Floats, rows: RowBlock) -> float | None:
    errors = ape(prediction_us, rows.elapsed_us)
    return float(errors.mean()) if len(errors) else None
