"""What a step costs, with a band, and whether one may rely on it.

    us   = (T(P, n) + s C) · level                     shapes.py: what steps of such a shape took, or the coefficients
    low  = us · (1 - sqrt((1 - p10(stratum))^2 + (1.28 w)^2))     high the same of p90(stratum) - 1
    w    = sqrt((x' C x + sum_j (x_j form_j)^2) / (x beta)^2)                 outside of what was seen, 0 inside

Microseconds; P prefill tokens, C tokens of decode context, n requests. p10 and p90 are measured: eighty per cent of the
steps of that stratum fell between them. Outside of what was seen the errors of the coefficients count as well: those
of sampling by their covariance C (independent where a file has none), and how far the form of the line lets each of
them move under another load. None of these depends on another, so that their squares are added.

Rows that are means of a whole request are of hundreds of steps of all kinds, which scatter less than a step of one kind
is off: there the mean error of the rows' predictions is another square.

``level`` is 1, or for a step of now what the last steps of its phase took beside the rest. ``portable`` is used, the
set that every consumer can compute. A stratum without an interval has that of the nearest of its kind, or the pooled
one. Guards: ``low <= us <= high``, and ``low >= 0``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import mul
from typing import NamedTuple

from .document import ACTIVE_EXPERTS, STEP_TIME, ConfigDocument, Model, Target
from .exceptions import REQUESTS_MAX, TOKENS_MAX, NoCoefficientsError, checked
from .shapes import (
    FEATURES,
    NORMAL_P90,
    Band,
    Coefficients,
    StepSurface,
    log2,
    middle_of,
    unsure,
)

_MEANS_OF_REQUESTS = ("journeys", "requests")
_ROWS_MIN, _WINDOWS_MIN = 256, 64
"""Rows of single steps or requests, and of windows between two pages, each of which holds many steps."""
_MEDIAN_APE_MAX = 0.25
LEVEL_AGE_MAX_S = 10.0
"""An older level says nothing of now: what it follows passes within seconds."""
_SHAPE_OCTAVES, _BATCH_OCTAVES = 1.0, 0.75
"""How far the nearest shape of single steps may be, in requests and tokens together, or the nearest batch of means."""
_BUDGET_ASSUMED = 2048.0
"""The smallest of vLLM's defaults for ``max_num_batched_tokens`` of an API server."""
_ALL = (-math.inf, math.inf)


class Prediction(NamedTuple):
    """Time of one step in microseconds, with the band that eight of ten fall into.

    ``extrapolated`` names what lies outside of what was learned from: a feature, ``context_per_request``, ``shape`` (no
    batch near it was seen) or a limit of the engine; and then ``model``, where it may be a mixture of experts.
    ``usable``: the coefficients carry this answer.
    """

    us: float
    low: float
    high: float
    extrapolated: tuple[str, ...]
    usable: bool


class Limits(NamedTuple):
    """What the engine can hold and do in one step; None: nobody said."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None


class StepModel:
    """Step times of one configuration; with a moment, of the next seconds after it.

    Raises:
        NoCoefficientsError: there is nothing that this client can predict with.
    """

    def __init__(self, config: ConfigDocument, limits: Limits, at_unix_nano: int | None = None) -> None:
        if config.quarantined:
            raise NoCoefficientsError(f"configuration {config.config_id} is quarantined: {config.quarantined}")
        self.model = computable_model(config, STEP_TIME)
        target = config.targets[STEP_TIME]
        self.limits = limits
        self.budget = float(limits.max_num_batched_tokens or math.inf)
        self.requests_max = float(limits.max_num_seqs or math.inf)
        self.reasons = (*config.doubts, *doubts_of(self.model, config.telemetry))
        self.of_means = of_means(config.telemetry)
        self._model_is_known = config.model_is_known
        self._refusing = {"shape", "model", *(name for name, limit in limits._asdict().items() if limit is None)}
        cells = (self.of_means and target.shapes) or target.cells  # a mean that was thrown away is no batch
        self._seen_octaves = {self._octaves(*step) for step in map(middle_of, cells) if step is not None}
        self.seen = target.seen
        self._bounds = [self.seen.get(name, _ALL) for name in FEATURES[1:]]
        usual = [each.usual for each in target.shapes.values() if each.usual is not None and each.usual.requests > 0.0]
        lengths = [length for each in usual if (length := each.decode_context_tokens / each.requests) > 0.0]
        self._lengths = min(lengths, default=0.0) / 2.0, max(lengths, default=math.inf) * 2.0
        values = {each.name: each.value for each in self.model.coefficients}
        self.coefficients = Coefficients(values, config.missed_experts or 0.0)
        wider = self.model.mape or 0.0 if config.telemetry in _MEANS_OF_REQUESTS else 0.0
        self.surface = StepSurface(target, self.coefficients, of_means=self.of_means, wider=wider)
        self.level = _level(target, "decode", at_unix_nano), _level(target, "prefill", at_unix_nano)
        self._stalls = 1.0 if self.of_means else target.mean_factor

    # ---------------------------------------------------------------- one step

    def predict(self, prefill_tokens: object, requests: object, decode_context_tokens: object) -> Prediction:
        """One step, from numbers nobody has looked at yet."""
        prefill = checked("prefill_tokens", prefill_tokens, 0.0, TOKENS_MAX)
        batch = checked("requests", requests, 0.0, REQUESTS_MAX)
        context = checked("decode_context_tokens", decode_context_tokens, 0.0, TOKENS_MAX)
        band, outside = self.band(prefill, batch, context), self.outside(prefill, batch, context)
        if outside:
            band = unsure(band, band[0] * self.spread(prefill, batch, context))
        return Prediction(*band, outside, self.usable(outside, prefill, batch, context))

    def band(self, prefill_tokens: float, requests: float, decode_context_tokens: float, *, mean: bool = False) -> Band:
        """us, low and high of one step, or of the ``mean`` of many: with stalls, and where no time falls by chance."""
        us, low, high = self.surface.band(prefill_tokens, requests, decode_context_tokens, monotone=mean)
        level = self.level[prefill_tokens > 0] * (self._stalls if mean else 1.0)
        return us * level, low * level, high * level

    def outside(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> tuple[str, ...]:
        """Names of what was never seen like that: features, the shape, limits of the engine.

        ``context_per_request`` is outside below half, and above twice, of all cells': prompts of such a length may
        cost something else.
        """
        step = (prefill_tokens, decode_context_tokens, requests)
        inside = {
            name: low <= value <= high
            for name, value, (low, high) in zip(FEATURES[1:], step, self._bounds, strict=True)
        }
        low, high = self._lengths
        length = decode_context_tokens / max(requests, 1.0)
        inside["context_per_request"] = not length or low <= length <= high
        tokens, batch = self._octaves(prefill_tokens, requests)
        most = _BATCH_OCTAVES if self.of_means else _SHAPE_OCTAVES
        near = (abs(tokens - of_seen) + abs(batch - seen) <= most for of_seen, seen in self._seen_octaves)
        inside["shape"] = not self._seen_octaves or any(near)
        (_, context_seen), (_, requests_seen) = self._bounds[1:]
        inside["max_num_seqs"] = requests <= (self.limits.max_num_seqs or requests_seen)
        inside["kv_tokens"] = self.limits.kv_tokens is not None or decode_context_tokens <= context_seen
        inside["max_num_batched_tokens"] = prefill_tokens <= self.budget
        outside = tuple(name for name, is_so in inside.items() if not is_so)
        return (*outside, "model") if outside and not self._model_is_known else outside

    def _octaves(self, prefill_tokens: float, requests: float) -> tuple[float, float]:
        """Of a step's tokens and requests. Of means, which hardly ever have no prefill, only the requests count."""
        return 0.0 if self.of_means else log2(prefill_tokens), log2(requests)

    def budget_of(self, requests: float) -> float:
        """Tokens that a step of so many requests may have; where nobody said, assumed, and enough for twice as many."""
        return self.budget if self.budget < math.inf else max(_BUDGET_ASSUMED, 2.0 * requests)

    def spread(self, prefill: float, requests: float, context: float) -> float:
        """1.28 w of the module."""
        work = self.coefficients.work(prefill, requests, context)
        x = [work[each.name] for each in self.model.coefficients]
        variance = sum(a * sum(map(mul, row, x)) for a, row in zip(x, self.model.error_covariance, strict=True))
        variance += sum((work[each.name] * (each.form_error or 0.0)) ** 2 for each in self.model.coefficients)
        by_coefficients_us = self.coefficients.step_us(prefill, requests, context)
        return NORMAL_P90 * math.sqrt(max(variance, 0.0)) / max(by_coefficients_us, 1e-9)

    def usable(self, outside: Collection[str], prefill: float, requests: float, context: float) -> bool:
        """Inside of what was seen the sum carries; outside every term that makes up a tenth must be identified.

        No line carries beyond the shapes that were seen, nor that of a model that may be a mixture, for nobody said.
        Where nobody told a limit, none carries what is more than was ever seen at once: some of it may wait.
        """
        if self.reasons or not outside:
            return not self.reasons
        if not self._refusing.isdisjoint(outside):
            return False
        terms = self.coefficients.terms(prefill, requests, context)
        least = 0.1 * sum(terms.values())
        return all(terms[each.name] < least or each.status == "identified" for each in self.model.coefficients)


# ------------------------------------------------------------------- what it stands on


def _level(target: Target, phase: str, at_unix_nano: int | None) -> float:
    """What x beta F of a phase is multiplied by at that moment; 1 without one, or where its level is too old."""
    level = target.level.get(phase)
    if level is None or at_unix_nano is None or at_unix_nano - level.last_row_unix_nano > LEVEL_AGE_MAX_S * 1e9:
        return 1.0
    return level.factor


def of_means(telemetry: str) -> bool:
    """Whether rows of this quality cover many steps each: what was learned is of mean steps, stalls included."""
    return telemetry in (*_MEANS_OF_REQUESTS, "metrics")


def computable_model(config: ConfigDocument, name: str) -> Model:
    """``portable`` of a target, else its champion; of a step only features that follow from what a step is asked by.

    Raises:
        NoCoefficientsError: there is none; it says which and why.
    """
    target = config.targets.get(name)
    known = {*FEATURES} if config.missed_experts is None else {*FEATURES, ACTIVE_EXPERTS}
    if target is None:
        raise NoCoefficientsError(f"configuration {config.config_id} has learned nothing about {name} yet")
    for key in ("portable", target.champion):
        model = target.models.get(key)
        names = set() if model is None else {each.name for each in model.coefficients}
        if model is not None and names and (name != STEP_TIME or names <= known):
            return model
    raise NoCoefficientsError(
        f"configuration {config.config_id} publishes no coefficients of {name} that can be computed from what is asked"
    )


def doubts_of(model: Model, telemetry: str) -> tuple[str, ...]:
    """Why one should not rely on these coefficients; empty if one may."""
    doubts, rows_min = [], _WINDOWS_MIN if telemetry == "metrics" else _ROWS_MIN
    if all(each.status == "prior_only" for each in model.coefficients):
        doubts.append("every coefficient is a donor's or a data sheet's")
    elif model.rows < rows_min:
        doubts.append(f"learned from {model.rows} rows, fewer than {rows_min}")
    if model.median_ape is not None and model.median_ape > _MEDIAN_APE_MAX:
        doubts.append(f"half of its predictions are off by more than {model.median_ape:.0%}")
    return tuple(doubts)
