"""What a step costs: coefficients times work, times the factor of the step's shape, with a band.

    us   = (b0 + bP P + bC C + bn n) · F(cell)         P prefill tokens, C tokens of decode context, n requests
    low  = us · p10(stratum) - 1.28 s                  high = us · p90(stratum) + 1.28 s
    s    = F sqrt(sum_j (x_j stderr_j)^2) outside of what was seen, 0 inside

Microseconds. p10 and p90 are measured: eighty per cent of the steps of that stratum fell between them, so inside of
what was seen nothing has to be added. Outside, the errors of the coefficients count as well; their covariance is not
published, so they are added as if independent, which is more than the truth where two columns stand in for each other.

``portable`` is used, the set that every consumer can compute. A cell without a factor has F = 1; a stratum without an
interval has the pooled one. Guards: ``low <= us <= high``, and ``low >= 0``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import mul
from typing import NamedTuple, cast, overload

from .document import ConfigDocument
from .evidence import FEATURES, STEP_TIME, caveats_of, computable_model, doubts_of, of_means, visited_strata
from .faults import REQUESTS_MAX, TOKENS_MAX, BadInputError, NoCoefficientsError, checked
from .near_steps import NearSteps
from .shape_table import STRIDE, Band, ShapeTable
from .shapes import TOKEN_CLASSES, stratum_name, token_class

_NORMAL_P90 = 1.2816
_CLASSES_END = 8192
_ASKED = (*FEATURES[1:], "shape", "max_num_seqs", "max_num_batched_tokens")
"""What an answer may lie outside of, in the order of ``StepModel.outside``."""


class Prediction(NamedTuple):
    """Time of one step in microseconds, with the band that eight of ten fall into.

    ``extrapolated`` names what lies outside of what was learned from: a feature, ``shape`` (no such batch was seen) or
    a limit of the engine. ``usable``: the coefficients carry this answer.
    """

    us: float
    low: float
    high: float
    extrapolated: tuple[str, ...]
    usable: bool


class Predictions(Sequence[Prediction]):
    """Many of them by column; one of them is made when it is asked for."""

    __slots__ = ("_model", "_work", "high", "low", "us")

    def __init__(
        self, model: StepModel, work: tuple[Sequence[float], ...], us: list[float], low: list[float], high: list[float]
    ) -> None:
        self._model = model
        self._work = work
        self.us = us
        self.low = low
        self.high = high

    def __len__(self) -> int:
        return len(self.us)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prediction]: ...
    def __getitem__(self, index: int | slice) -> Prediction | Sequence[Prediction]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        prefill, requests, context = (column[index] for column in self._work)
        return self._model.predict(prefill, requests, context)

    @property
    def extrapolated(self) -> list[tuple[str, ...]]:
        """What lies outside of what was seen, per step."""
        return [self._model.outside(*step) for step in zip(*self._work, strict=True)]


class Limits(NamedTuple):
    """What the engine can hold and do in one step; None: nobody said."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None


class StepModel:
    """Step times of one configuration.

    Raises:
        NoCoefficientsError: there is nothing that this client can predict with.
    """

    __slots__ = (
        "_bounds",
        "_classes",
        "_interval",
        "_shapes",
        "_strata",
        "_sureness",
        "_visits",
        "budget",
        "coefficients",
        "limits",
        "mean_factor",
        "mixture_of_experts",
        "model",
        "near",
        "of_means",
        "reasons",
        "requests_max",
        "target",
    )

    def __init__(self, config: ConfigDocument, limits: Limits) -> None:
        if config.quarantined:
            raise NoCoefficientsError(f"configuration {config.config_id} is quarantined: {config.quarantined}")
        target = config.targets.get(STEP_TIME)
        self.model = computable_model(config.config_id, STEP_TIME, target)
        assert target is not None  # noqa: S101 - computable_model raised
        self.target = target
        self.limits = limits
        self.budget = float(limits.max_num_batched_tokens or math.inf)
        self.requests_max = float(limits.max_num_seqs or math.inf)
        by_name = {each.name: each for each in self.model.coefficients}
        values = [by_name[name].value if name in by_name else 0.0 for name in FEATURES]
        self.coefficients: tuple[float, float, float, float] = (values[0], values[1], values[2], values[3])
        coefficients = self.model.coefficients
        self._sureness = [(FEATURES.index(c.name), c.stderr or 0.0, c.status == "identified") for c in coefficients]
        self.of_means = of_means(config.telemetry)
        self.mixture_of_experts = config.mixture_of_experts
        self.mean_factor = 1.0 if self.of_means else min(max(target.mean_factor, 0.5), 2.0)
        self._interval = target.interval
        self._strata = visited_strata(target, config.telemetry)
        self._visits: dict[int, bool] = {}
        seen = {} if target.seen is None else target.seen.features
        self._bounds = [seen.get(name, (-math.inf, math.inf)) for name in FEATURES[1:]]
        self.reasons = (*config.doubts, *doubts_of(self.model))
        self._shapes = ShapeTable(target)
        self.near = NearSteps(target, self.coefficients, of_means=self.of_means)
        self._classes = _classes_table()

    # ---------------------------------------------------------------- one step

    def predict(self, prefill_tokens: object, requests: object, decode_context_tokens: object) -> Prediction:
        """One step, from numbers nobody has looked at yet."""
        prefill = checked("prefill_tokens", prefill_tokens, 0.0, TOKENS_MAX)
        batch = checked("requests", requests, 0.0, REQUESTS_MAX)
        context = checked("decode_context_tokens", decode_context_tokens, 0.0, TOKENS_MAX)
        us, low, high = self.band(prefill, batch, context)
        outside = self.outside(prefill, batch, context)
        if outside:
            spread_us = self.spread_us(prefill, batch, context)
            low, high = max(0.0, low - spread_us), high + spread_us
        return Prediction(us, low, high, outside, self.usable(outside, prefill, batch, context))

    def band(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> Band:
        """us, low and high of one step inside of what was seen; the numbers are trusted."""
        b0, b_prefill, b_context, b_requests = self.coefficients
        factor, p10, p90 = self._shapes[STRIDE * round(requests) + token_class(prefill_tokens)]
        us = (b0 + b_prefill * prefill_tokens + b_context * decode_context_tokens + b_requests * requests) * factor
        return us, us * p10, us * p90

    def outside(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> tuple[str, ...]:
        """Names of what was never seen like that."""
        (prefill_low, prefill_high), (context_low, context_high), (requests_low, requests_high) = self._bounds
        inside = (
            prefill_low <= prefill_tokens <= prefill_high,
            context_low <= decode_context_tokens <= context_high,
            requests_low <= requests <= requests_high,
            not self._strata or self._visited(prefill_tokens, requests),
            requests <= self.requests_max,
            prefill_tokens <= self.budget,
        )
        return () if all(inside) else tuple(name for name, good in zip(_ASKED, inside, strict=True) if not good)

    def _visited(self, prefill_tokens: float, requests: float) -> bool:
        """Whether the step's stratum has evidence; each stratum is looked up by name once."""
        key = 2 * int(requests).bit_length() + (prefill_tokens > 0)
        if key not in self._visits:
            self._visits[key] = stratum_name(prefill_tokens, requests) in self._strata
        return self._visits[key]

    def spread_us(self, prefill_tokens: float, requests: float, decode_context_tokens: float) -> float:
        """1.28 standard errors of the sum, as if the coefficients' errors were independent."""
        work = (1.0, prefill_tokens, decode_context_tokens, requests)
        variance = sum([(work[index] * stderr) ** 2 for index, stderr, _ in self._sureness])
        factor = self._shapes[STRIDE * round(requests) + token_class(prefill_tokens)][0]
        return _NORMAL_P90 * factor * math.sqrt(variance)

    def usable(self, outside: Collection[str], prefill: float, requests: float, context: float) -> bool:
        """Inside of what was seen the sum carries; outside every term that makes up a tenth must be identified.

        A mixture of experts carries nothing beyond the batches that were seen.
        """
        if self.reasons or not outside:
            return not self.reasons
        if caveats_of(outside, mixture_of_experts=self.mixture_of_experts):
            return False
        terms = list(map(mul, self.coefficients, (1.0, prefill, context, requests)))
        least = 0.1 * sum(terms)
        return all(identified or terms[index] < least for index, _, identified in self._sureness)

    # ---------------------------------------------------------------- many steps

    def predict_many(self, prefill_tokens: object, requests: object, decode_context_tokens: object) -> Predictions:
        """Columns of steps; a plain number stands for a whole column."""
        prefill, batch, context = _columns(
            (prefill_tokens, requests, decode_context_tokens),
            ("prefill_tokens", "requests", "decode_context_tokens"),
        )
        b0, b_prefill, b_context, b_requests = self.coefficients
        shapes, classes = self._shapes, self._classes
        whole = isinstance(sum(batch), int) and isinstance(sum(prefill), int)  # one float makes the sum a float
        if whole and (not prefill or max(prefill) < _CLASSES_END):
            pairs = cast("Iterable[tuple[int, int]]", zip(batch, prefill, strict=True))
            keys = [shapes[STRIDE * n + classes[p]] for n, p in pairs]
        else:
            keys = [shapes[STRIDE * round(n) + token_class(p)] for n, p in zip(batch, prefill, strict=True)]
        us = [
            (b0 + b_prefill * p + b_context * c + b_requests * n) * shape[0]
            for p, n, c, shape in zip(prefill, batch, context, keys, strict=True)
        ]
        low = [each * shape[1] for each, shape in zip(us, keys, strict=True)]
        high = [each * shape[2] for each, shape in zip(us, keys, strict=True)]
        return Predictions(self, (prefill, batch, context), us, low, high)


def _classes_table() -> bytes:
    """Class of every number of prefill tokens below 8192; classes are ranges, so made range by range."""
    if not _CLASSES:
        start = 0
        while start < _CLASSES_END:
            this = token_class(start)
            stop = next(t for t in _edges(start) if token_class(t) != this)
            _CLASSES.extend(bytes([this]) * (min(stop, _CLASSES_END) - start))
            start = stop
    return bytes(_CLASSES)


_CLASSES = bytearray()


def _edges(start: int) -> Iterable[int]:
    yield start + 1
    for tokens_class in range(1, TOKEN_CLASSES + 1):
        edge = math.ceil(2 ** (tokens_class / 2))
        if edge > start:
            yield from (edge - 1, edge, edge + 1)


def _columns(values: tuple[object, ...], names: tuple[str, ...]) -> list[Sequence[float]]:
    """Columns of one length, checked as a whole."""
    lists: list[list[float] | tuple[float, ...] | None] = []
    numbers: dict[str, float] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, (list, tuple)):
            lists.append(value)
        elif hasattr(value, "tolist"):  # numpy, array, pandas
            listed = value.tolist()
            lists.append(listed if isinstance(listed, list) else None)
            if lists[-1] is None:
                numbers[name] = checked(name, listed, 0.0, TOKENS_MAX)
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, AbstractSet)):
            lists.append(list(value))
        else:
            numbers[name] = checked(name, value, 0.0, TOKENS_MAX)  # a number for the whole column
            lists.append(None)
    lengths = {len(column) for column in lists if column is not None}
    if len(lengths) != 1:
        raise BadInputError(" and ".join(names), f"columns of different lengths: {sorted(lengths)}")
    length = lengths.pop()
    columns: list[Sequence[float]] = [
        [numbers[name]] * length if column is None else column for column, name in zip(lists, names, strict=True)
    ]
    return [
        _checked_column(name, column, REQUESTS_MAX if name == "requests" else TOKENS_MAX)
        for name, column in zip(names, columns, strict=True)
    ]


def _checked_column(name: str, column: Sequence[float], highest: float) -> Sequence[float]:
    """The column itself where one look at all of it will do, else number by number."""
    try:
        total = sum(column)  # of another type where one of them is
        good = not column or (min(column) >= 0 and max(column) <= highest and math.isfinite(total))
        if good and type(total) in (int, float):
            return column
    except (TypeError, ValueError, ArithmeticError):
        pass
    return [checked(f"{name}[{index}]", value, 0.0, highest) for index, value in enumerate(column)]
