"""The snapshot document, checked and typed, and the verdict on each configuration: the only module that touches JSON.

Accepted: schema ``tracefit.snapshot/1`` and its minors (``/1.4``), whose unknown keys pass. What a prediction needs is
checked here, once, with the place of what is wrong; everything else is left as it was sent. No number that is not
finite gets through.

The verdict says whether the numbers of a configuration may be used, how good they are, and what changed. Page, metrics,
log and commands read it and decide nothing of their own, so that all of them say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .faults import FINITE_MAX, LoadError, printable
from .news import ODD_NAMED, OddReplica, SpeedChange
from .selection import SILENT_NS

SCHEMA = "tracefit.snapshot/1"
STEP_TIME = "step_time"
Ratios = tuple[float, float]
Object = Mapping[str, Any]
_NO_ROWS: Mapping[str, float] = {}


class Coefficient(NamedTuple):
    """One coefficient: ``value`` per ``unit``, its standard error, and the mean of its feature (None: not known).

    ``stderr`` is for the load that it was learned from; ``form_error``, how far it may move under another one.
    ``reason``: why it should not be used alone, one word of those in docs/learning.md.
    """

    name: str
    unit: str
    value: float
    stderr: float | None
    status: str
    mean: float | None
    reason: str = ""
    form_error: float | None = None


class Model(NamedTuple):
    """Coefficients learned on one feature set; errors are ratios, None before anything was predicted.

    ``covariance``: of the coefficients' errors, one row per coefficient in their order; empty where nobody said.
    ``plain_median_ape``: of the coefficients alone, without the factors of batch shapes.
    """

    name: str
    coefficients: tuple[Coefficient, ...]
    rows: int
    mape: float | None
    median_ape: float | None
    covariance: tuple[tuple[float, ...], ...] = ()
    plain_median_ape: float | None = None


class Interval(NamedTuple):
    """P10 and P90 of observed ÷ predicted: over all, and by stratum."""

    pooled: Ratios
    strata: Mapping[str, Ratios]


class Seen(NamedTuple):
    """Lowest and highest value of each feature per step, and the names of the visited cells (empty: not known)."""

    features: Mapping[str, Ratios]
    cells: frozenset[str]


class UsualWork(NamedTuple):
    """What the steps of a cell are made of in the mean, and take."""

    prefill_tokens: float
    requests: float
    decode_context_tokens: float
    us: float


class InFlight(NamedTuple):
    """What each request in flight adds to a time, on top of its value at ``requests`` of them."""

    requests: float
    us_per_request: float


class Level(NamedTuple):
    """By how much the last steps of one phase took longer than predicted, as a factor; the newest ended then."""

    factor: float
    last_row_unix_nano: int


_NO_WORK: Mapping[str, UsualWork] = {}
_NO_LEVEL: Mapping[str, Level] = {}


class Target(NamedTuple):
    """Everything known about one kind of time.

    ``factors`` are the shape factors by cell name, all 1 while they are not ``factors_applied``; ``factor_rows`` and
    ``usual_work`` the rows behind each and their mean work, where told; ``mean_factor`` is mean ÷ robust fit;
    ``step_ahead_us``, the part of the intercept that is a step scheduled ahead, None where none is known to be;
    ``context_us_per_token``, what a token
    of decode context costs among steps of about one size, None where nobody said; ``in_flight``, what the time
    grows by with the requests in flight, None where it does not; ``level``, of ``decode`` and ``prefill`` steps;
    ``change``, the newest confirmed change of speed; ``odd``, the engines of another speed than the others.
    """

    name: str
    champion: str
    models: Mapping[str, Model]
    interval: Interval | None
    factors: Mapping[str, float]
    seen: Seen | None
    mean_us: float | None
    mean_factor: float
    step_ahead_us: float | None = None
    factor_rows: Mapping[str, float] = _NO_ROWS
    usual_work: Mapping[str, UsualWork] = _NO_WORK
    context_us_per_token: float | None = None
    in_flight: InFlight | None = None
    factors_applied: bool = True
    level: Mapping[str, Level] = _NO_LEVEL
    change: SpeedChange | None = None
    odd: tuple[OddReplica, ...] = ()


ACTIVE_EXPERTS = "active_experts"
"""The feature that counts the share of experts that a step's tokens touch."""


class ConfigDocument(NamedTuple):
    """One configuration as published.

    ``scheduled_ahead``: its engines hand over a step before the last one ended. ``doubts``: why nothing it answers
    should be used, one clause each. ``last_heard_unix_nano``: when the newest
    telemetry of its engines was made, 0 where nobody said. ``replaced``: its server sends another configuration now.
    ``prefix_hits_hidden``: its telemetry counts prompt tokens that were never computed, so that a coefficient is the
    price of one that was sent.
    """

    config_id: str
    facts: Mapping[str, str | int | float | bool]
    telemetry: str
    engines: int
    quarantined: str
    targets: Mapping[str, Target]
    scheduled_ahead: bool = False
    doubts: tuple[str, ...] = ()
    last_heard_unix_nano: int = 0
    replaced: bool = False
    prefix_hits_hidden: bool = False

    @property
    def missed_experts(self) -> float | None:
        """1 - k/E, the share of experts that one token leaves alone; None where they are not known."""
        experts, per_token = self.facts.get("num_experts"), self.facts.get("num_experts_per_tok")
        if type(experts) is not int or type(per_token) is not int or not 0 < per_token <= experts:
            return None
        return 1.0 - per_token / experts


class Document(NamedTuple):
    """The whole snapshot as published."""

    generation: int
    created_unix_nano: int
    tracefit_version: str
    configs: tuple[ConfigDocument, ...]


# ------------------------------------------------------------------- the verdict

_TELEMETRY_GAPS = {
    "sampled": "steps are sampled, and those between are rebuilt from request journeys",
    "journeys": "the batch of each step is rebuilt from request journeys",
    "requests": "one span per request and no steps",
    "metrics": "means of many steps, from pages of counters",
    "merged": "merged states do not say which telemetry they are from; a sidecar or a replay does",
}
_PREFIX_HITS = "prefix-cache hits are hidden: a prompt token costs the mean of cached and computed ones"


class Problem(NamedTuple):
    """Something to look at, in one clause; ``is_defect``: something failed, and waiting does not mend it."""

    text: str
    is_defect: bool = False


class Verdict(NamedTuple):
    """What is to be thought of one configuration, as of one snapshot.

    Attributes:
        usable: its predictions may be used where something was seen.
        reasons: why not, one clause each; empty if they may.
        doubts: those of the reasons that more rows do not mend.
        quarantined: why its learner was put aside; empty if it was not.
        error: median relative error of the predictions that a reader of the snapshot computes; None before the first.
        rows: rows behind the coefficients of the step time.
        last_row_unix_nano: when the newest step that was learned from ended, 0 where nobody said.
        last_heard_unix_nano: when the newest telemetry of its engines was made, 0 where nobody said.
        replaced: its server sends another configuration now.
        change: the newest confirmed change of the speed of its steps.
        odd: the engines of another speed than their siblings.
        seen: lowest and highest value per step of each feature that was learned from.
        hidden: what its telemetry samples or does not tell, one clause each.
    """

    usable: bool
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    quarantined: str = ""
    error: float | None = None
    rows: int = 0
    last_row_unix_nano: int = 0
    last_heard_unix_nano: int = 0
    replaced: bool = False
    change: SpeedChange | None = None
    odd: tuple[OddReplica, ...] = ()
    seen: Mapping[str, Ratios] = {}
    hidden: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``usable``, ``not usable yet``, ``not usable`` or ``put aside``."""
        if self.quarantined:
            return "put aside"
        if self.usable:
            return "usable"
        return "not usable" if self.doubts else "not usable yet"

    def to_dict(self) -> dict[str, object]:
        """For JSON: the same keys, and ``state``."""
        change = None if self.change is None else self.change._asdict()
        seen = {name: list(bounds) for name, bounds in self.seen.items()}
        odd = [each._asdict() for each in self.odd]
        return {"state": self.state, **self._asdict(), "change": change, "odd": odd, "seen": seen}

    def silent_since(self, now_unix_nano: int) -> int:
        """When its engines were last heard of, if they are gone: replaced, or silent for ten minutes. Else 0."""
        is_gone = self.replaced or now_unix_nano - self.last_heard_unix_nano > SILENT_NS
        return self.last_heard_unix_nano if is_gone else 0

    def problems(self, now_unix_nano: int) -> tuple[Problem, ...]:
        """What a person should hear first: what failed, what is in doubt, what changed within a day."""
        problems = [Problem("put aside, its learner failed", is_defect=True)] if self.quarantined else []
        problems += [Problem(f"not usable: {doubt}", is_defect=True) for doubt in self.doubts]
        if self.change is not None and self.change.is_news(now_unix_nano) and not self.replaced:
            problems.append(Problem(self.change.text(now_unix_nano)))
        return (*problems, *(Problem(each.text) for each in self.odd))


def judged(config: ConfigDocument, reasons: tuple[str, ...], model: Model | None) -> Verdict:
    """The verdict; ``model`` predicts its steps, and ``reasons`` speak against it."""
    step = config.targets.get(STEP_TIME)
    spans = config.facts.get("trace_sampling", 1.0)
    hidden = (
        _TELEMETRY_GAPS.get(config.telemetry, ""),
        f"a span of {spans:.1%} of the requests" if isinstance(spans, float) and spans < 1.0 else "",
        _PREFIX_HITS if config.prefix_hits_hidden else "",
    )
    levels = () if step is None else step.level.values()
    return Verdict(
        usable=not reasons,
        reasons=reasons,
        doubts=config.doubts,
        quarantined=config.quarantined,
        error=None if model is None else model.median_ape,
        rows=0 if model is None else model.rows,
        last_row_unix_nano=max((level.last_row_unix_nano for level in levels), default=0),
        last_heard_unix_nano=config.last_heard_unix_nano,
        replaced=config.replaced,
        change=None if step is None else step.change,
        odd=() if step is None else step.odd[:ODD_NAMED],
        seen={} if step is None or step.seen is None else step.seen.features,
        hidden=tuple(filter(None, hidden)),
    )


# ------------------------------------------------------------------- reading it


def parse(data: bytes, where: str) -> Document:
    """Read a snapshot.

    Raises:
        LoadError: one sentence that begins with ``where``.
    """
    if data[:256].lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise LoadError(f"{where} is a page for people, not a snapshot")
    import json  # noqa: PLC0415 - a tenth of the time to import this package

    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise LoadError(f"{where} is not a snapshot: it is not JSON") from None
    if not isinstance(tree, dict) or not isinstance(schema := tree.get("schema", SCHEMA), str) or "configs" not in tree:
        raise LoadError(f"{where} is JSON, but not a snapshot of tracefit")
    if schema != SCHEMA and not schema.startswith(SCHEMA + "."):
        raise LoadError(f"{where} has schema {schema[:64]!r}; this client reads {SCHEMA} and its minors")
    try:
        return Document(
            _whole(tree, "generation"),
            _whole(tree, "created_unix_nano"),
            _text(tree, "tracefit_version"),
            tuple(_config(each) for each in _list(tree["configs"], "configs")),
        )
    except _Wrong as error:
        raise LoadError(f"{where} is not a snapshot: {error}") from None


class _Wrong(Exception):
    """Where the document is not what it should be."""


def _config(tree: Any) -> ConfigDocument:
    tree = _object(tree, "configs")
    config_id = _text(tree, "config_id")
    facts = _object(tree.get("config", {}), f"{config_id}.config")
    engines = _list(tree.get("engines", []), f"{config_id}.engines")
    return ConfigDocument(
        config_id,
        {
            key: printable(value) if isinstance(value, str) else value
            for key, value in facts.items()
            if isinstance(value, (str, int, float, bool))
        },
        _text(tree, "telemetry"),
        len(engines),
        _text(tree, "quarantined"),
        {
            name: _target(name, each, f"{config_id}.{name}")
            for name, each in _object(tree.get("targets", {}), f"{config_id}.targets").items()
        },
        any(isinstance(engine, dict) and engine.get("scheduling") == "async" for engine in engines),
        tuple(printable(str(each)) for each in _list(tree.get("doubts") or [], f"{config_id}.doubts")),
        _whole(tree, "last_heard_unix_nano"),
        bool(_text(tree, "replaced_by")),
        tree.get("prefix_hits_hidden") is True,
    )


def _target(name: str, tree: Any, where: str) -> Target:
    tree = _object(tree, where)
    models = _object(tree.get("models", {}), f"{where}.models")
    factor = _maybe(tree, "mean_factor", where)
    shapes = {
        cell: _object(each, f"{where}.shape_factors.{cell}")
        for cell, each in _object(tree.get("shape_factors") or {}, f"{where}.shape_factors").items()
    }
    return Target(
        name,
        _text(tree, "champion"),
        {key: _model(key, each, f"{where}.{key}") for key, each in models.items()},
        _interval(tree, f"{where}.interval"),
        {cell: _positive(each, "factor", f"{where}.shape_factors.{cell}") for cell, each in shapes.items()},
        _seen(tree, f"{where}.seen"),
        _maybe(tree, "mean_us", where),
        1.0 if factor is None else factor,
        _maybe(tree, "step_ahead_us", where),
        {
            cell: rows
            for cell, each in shapes.items()
            if (rows := _maybe(each, "rows", f"{where}.shape_factors.{cell}")) is not None
        },
        {
            cell: UsualWork(*_numbers(each["usual"], 4, f"{where}.shape_factors.{cell}.usual"))
            for cell, each in shapes.items()
            if each.get("usual") is not None
        },
        None if tree.get("context_us_per_token") is None else _positive(tree, "context_us_per_token", where),
        _in_flight(tree, f"{where}.in_flight"),
        tree.get("shape_factors_applied") is not False,
        _levels(tree.get("level") or {}, f"{where}.level"),
        _change(tree, f"{where}.drift"),
        _odd(tree.get("replicas") or [], f"{where}.replicas"),
    )


def _model(name: str, tree: Any, where: str) -> Model:
    tree = _object(tree, where)
    # ``prediction_error`` may be of more than can be computed here: of a correction that is in no other key.
    errors = (tree.get(key) for key in ("shaped_error", "prediction_error", "error"))
    error = _object(next(filter(None, errors), {}), f"{where}.error")
    coefficients = tuple(_coefficient(each, where) for each in _list(tree.get("features", []), f"{where}.features"))
    covariance = _list(tree.get("covariance") or [], f"{where}.covariance")
    if len(covariance) not in {0, len(coefficients)}:
        raise _Wrong(f"{where}.covariance: expected {len(coefficients)} rows")
    return Model(
        name,
        coefficients,
        _whole(tree, "rows"),
        _maybe(error, "mape", where),
        _maybe(error, "median_ape", where),
        tuple(tuple(_numbers(row, len(coefficients), f"{where}.covariance")) for row in covariance),
        _maybe(_object(tree.get("error") or {}, f"{where}.error"), "median_ape", where),
    )


def _coefficient(tree: Any, where: str) -> Coefficient:
    tree = _object(tree, f"{where}.features")
    name = _text(tree, "name")
    return Coefficient(
        name,
        _text(tree, "unit"),
        _number(tree.get("coefficient"), f"{where}.{name}"),
        _maybe(tree, "stderr", f"{where}.{name}"),
        _text(tree, "status"),
        _maybe(tree, "mean", f"{where}.{name}"),
        printable(str(tree.get("reason") or "")),
        _maybe(tree, "form_error", f"{where}.{name}"),
    )


def _interval(target: Object, where: str) -> Interval | None:
    if (tree := _inner(target, "interval", where)) is None:
        return None
    strata = {}
    for name, ratios in _object(tree.get("strata") or {}, where).items():
        p10, _, p90 = _numbers(ratios, 3, f"{where}.{name}")
        strata[name] = (p10, p90)
    return Interval((_number(tree.get("p10"), where), _number(tree.get("p90"), where)), strata)


def _in_flight(target: Object, where: str) -> InFlight | None:
    if (tree := _inner(target, "in_flight", where)) is None:
        return None
    return InFlight(_positive(tree, "requests", where), _positive(tree, "us_per_request", where))


def _levels(tree: Any, where: str) -> dict[str, Level]:
    each = {name: _object(level, f"{where}.{name}") for name, level in _object(tree, where).items()}
    return {
        name: Level(_positive(level, "factor", f"{where}.{name}"), _whole(level, "last_row_unix_nano"))
        for name, level in each.items()
    }


def _change(target: Object, where: str) -> SpeedChange | None:
    if (tree := _inner(target, "drift", where)) is None:
        return None
    if tree.get("gain") is None or tree.get("last_unix_nano") is None:
        return None
    added, within_s = _maybe(tree, "added", where), _maybe(tree, "last_within_s", where)
    since = _whole(tree, "last_unix_nano")
    return SpeedChange(_positive(tree, "gain", where), since, _text(tree, "term"), added, within_s)


def _odd(tree: Any, where: str) -> tuple[OddReplica, ...]:
    replicas = [_object(each, where) for each in _list(tree, where)]
    return tuple(
        OddReplica(
            _text(each, "engine"),
            _positive(each, "ratio", where),
            _maybe(each, "stderr", where),
            _text(each, "term"),
            _maybe(each, "added", where),
            len(replicas) - 1,
        )
        for each in replicas
        if each.get("differs") and each.get("ratio") is not None
    )


def _seen(target: Object, where: str) -> Seen | None:
    if (tree := _inner(target, "seen", where)) is None:
        return None
    features = {}
    for name, bounds in _object(tree.get("features") or {}, where).items():
        lowest, highest = _numbers(bounds, 2, f"{where}.{name}")
        features[name] = (lowest, highest)
    return Seen(features, frozenset(str(each) for each in _list(tree.get("cells") or [], where)))


# ------------------------------------------------------------------- the checks


def _object(tree: Any, where: str) -> Object:
    if not isinstance(tree, dict):
        raise _Wrong(f"{where}: expected an object")
    return tree


def _inner(tree: Object, key: str, where: str) -> Object | None:
    value = tree.get(key)
    return None if value is None else _object(value, where)


def _text(tree: Object, key: str) -> str:
    return printable(str(tree.get(key, "")))


def _list(tree: Any, where: str) -> list[Any]:
    if not isinstance(tree, list):
        raise _Wrong(f"{where}: expected a list")
    return tree


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < FINITE_MAX:
        raise _Wrong(f"{where}: expected a finite number")
    return float(value)


def _numbers(tree: Any, length: int, where: str) -> list[float]:
    values = [_number(each, where) for each in _list(tree, where)]
    if len(values) != length:
        raise _Wrong(f"{where}: expected {length} numbers")
    return values


def _positive(tree: Object, key: str, where: str) -> float:
    value = _number(tree.get(key), f"{where}.{key}")
    if value <= 0.0:
        raise _Wrong(f"{where}.{key}: expected a positive number")
    return value


def _maybe(tree: Object, key: str, where: str) -> float | None:
    value = tree.get(key)
    return None if value is None else _number(value, f"{where}.{key}")


def _whole(tree: Object, key: str) -> int:
    value = tree.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"{key}: expected a whole number")
    return value
