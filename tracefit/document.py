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

from .exceptions import FINITE_MAX, LoadError, printable
from .selection import IDLE_NS
from .speed_change import OUTLIERS_NAMED, OutlierReplica, SpeedChange

SCHEMA = "tracefit.snapshot/1"
STEP_TIME = "step_time"
Ratios = tuple[float, float]
Object = Mapping[str, Any]


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

    @property
    def error_covariance(self) -> tuple[tuple[float, ...], ...]:
        """The same; of independent errors where nobody said, 0 where an error is not known."""
        return self.covariance or tuple(
            tuple((each.stderr or 0.0) ** 2 * (each is other) for other in self.coefficients)
            for each in self.coefficients
        )


class Interval(NamedTuple):
    """P10 and P90 of observed ÷ predicted: over all, and by stratum."""

    pooled: Ratios
    strata: Mapping[str, Ratios]


class Seen(NamedTuple):
    """Lowest and highest value of each feature per step, and the names of the visited cells (empty: not known)."""

    features: Mapping[str, Ratios]
    cells: frozenset[str]


class MeanWork(NamedTuple):
    """What the steps of a cell are made of in the mean, and take."""

    prefill_tokens: float
    requests: float
    decode_context_tokens: float
    us: float


class Shape(NamedTuple):
    """A cell of steps of about one shape: observed ÷ predicted, its rows, and what they usually are, where told."""

    factor: float
    rows: float
    usual: MeanWork | None


class Level(NamedTuple):
    """By how much the last steps of one phase took longer than predicted, as a factor; the newest ended then."""

    factor: float
    last_row_unix_nano: int


_NO_LEVEL: Mapping[str, Level] = {}


class Target(NamedTuple):
    """Everything known about one kind of time.

    ``shapes`` are by the name of their cell, and say nothing while they are not ``factors_applied``; ``mean_factor`` is
    mean ÷ robust fit; ``step_ahead_us``, the part of the intercept that is a step scheduled ahead, None where none is
    known to be; ``context_us_per_token``, what a token of decode context costs among steps of about one size, None
    where nobody said; ``level``, of ``decode`` and ``prefill`` steps; ``change``, the newest confirmed change of speed;
    ``outliers``, the engines of another speed than the others.
    """

    name: str
    champion: str
    models: Mapping[str, Model]
    interval: Interval | None
    shapes: Mapping[str, Shape]
    seen: Seen | None
    mean_us: float | None
    mean_factor: float
    step_ahead_us: float | None = None
    context_us_per_token: float | None = None
    factors_applied: bool = True
    level: Mapping[str, Level] = _NO_LEVEL
    change: SpeedChange | None = None
    outliers: tuple[OutlierReplica, ...] = ()


ACTIVE_EXPERTS = "active_experts"
"""The feature that counts the share of experts that a step's tokens touch."""


class ConfigDocument(NamedTuple):
    """One configuration as published.

    ``scheduled_ahead``: its engines hand over a step before the last one ended, None where nobody said. ``doubts``: why
    nothing it answers should be used, one clause each. ``last_heard_unix_nano``: when the newest telemetry of its
    engines was made, 0 where nobody said. ``replaced``: its server sends another configuration now.
    ``prefix_hits_hidden``: its telemetry counts prompt tokens that were never computed, so that a coefficient is the
    price of one that was sent.
    """

    config_id: str
    facts: Mapping[str, str | int | float | bool]
    telemetry: str
    engines: int
    quarantined: str
    targets: Mapping[str, Target]
    scheduled_ahead: bool | None = None
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
_UNCOUNTED = (
    "no page counts the requests (--scrape would), so that a sampler in a collector, or one more API server, would not "
    "show: coefficients and predictions may be wrong"
)
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
        quarantined: what its learner failed with; empty if it did not.
        error: median relative error of the predictions that a reader of the snapshot computes; None before the first.
        rows: rows behind the coefficients of the step time.
        last_row_unix_nano: when the newest step that was learned from ended, 0 where nobody said.
        last_heard_unix_nano: when the newest telemetry of its engines was made, 0 where nobody said.
        replaced: its server sends another configuration now.
        change: the newest confirmed change of the speed of its steps.
        outliers: the engines of another speed than their siblings.
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
    outliers: tuple[OutlierReplica, ...] = ()
    seen: Mapping[str, Ratios] = {}
    hidden: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``usable``, ``not usable yet``, ``not usable`` or ``quarantined``."""
        if self.quarantined:
            return "quarantined"
        if self.usable:
            return "usable"
        return "not usable" if self.doubts else "not usable yet"

    def to_dict(self) -> dict[str, object]:
        """For JSON: the same keys, and ``state``."""
        change = None if self.change is None else self.change._asdict()
        seen = {name: list(bounds) for name, bounds in self.seen.items()}
        outliers = [each._asdict() for each in self.outliers]
        return {"state": self.state, **self._asdict(), "change": change, "outliers": outliers, "seen": seen}

    def silent_since(self, now_unix_nano: int) -> int:
        """When its engines were last heard of, if they are gone: replaced, or silent for ten minutes. Else 0."""
        is_gone = self.replaced or now_unix_nano - self.last_heard_unix_nano > IDLE_NS
        return self.last_heard_unix_nano if is_gone else 0

    def problems(self, now_unix_nano: int) -> tuple[Problem, ...]:
        """What a person should hear first: what failed, what is in doubt, what changed within a day."""
        problems = [Problem("quarantined, its learner failed", is_defect=True)] if self.quarantined else []
        problems += [Problem(f"not usable: {doubt}", is_defect=True) for doubt in self.doubts]
        if self.change is not None and self.change.is_recent(now_unix_nano) and not self.replaced:
            problems.append(Problem(self.change.text(now_unix_nano)))
        return (*problems, *(Problem(each.text) for each in self.outliers))


def judged(config: ConfigDocument, reasons: tuple[str, ...], model: Model | None) -> Verdict:
    """The verdict; ``model`` predicts its steps, and ``reasons`` speak against it."""
    step = config.targets.get(STEP_TIME)
    spans = config.facts.get("trace_sampling")
    hidden = (
        _TELEMETRY_GAPS.get(config.telemetry, ""),
        _UNCOUNTED if config.telemetry == "requests" and spans is None else "",
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
        outliers=() if step is None else step.outliers[:OUTLIERS_NAMED],
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
    root = _Place(tree, "")
    try:
        return Document(
            root["generation"].whole(),
            root["created_unix_nano"].whole(),
            root["tracefit_version"].text(),
            tuple(map(_config, root["configs"].places())),
        )
    except _Wrong as error:
        raise LoadError(f"{where} is not a snapshot: {error}") from None


class _Wrong(Exception):
    """Where the document is not what it should be."""


class _Place:
    """A value of the document, and where it stands, which every check names; what is not there is None."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self.where = where

    def wrong(self, expected: str) -> _Wrong:
        return _Wrong(f"{self.where.removeprefix('.')}: expected {expected}")

    def object(self) -> Object:
        """Of an object; empty where there is no value."""
        if not isinstance(self.value, dict) and self.value is not None:
            raise self.wrong("an object")
        return self.value or {}

    def __getitem__(self, key: str) -> _Place:
        return _Place(self.object().get(key), f"{self.where}.{key}")

    def named(self) -> list[tuple[str, _Place]]:
        """Everything in an object, with its key."""
        return [(key, _Place(value, f"{self.where}.{key}")) for key, value in self.object().items()]

    def places(self) -> list[_Place]:
        """Of a list; none where there is no value."""
        if not isinstance(self.value, list) and self.value is not None:
            raise self.wrong("a list")
        return [_Place(value, self.where) for value in self.value or []]

    def text(self) -> str:
        return "" if self.value is None else printable(str(self.value))

    def number(self) -> float:
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < FINITE_MAX:
            raise self.wrong("a finite number")
        return float(value)

    def numbers(self, length: int) -> list[float]:
        values = [each.number() for each in self.places()]
        if len(values) != length:
            raise self.wrong(f"{length} numbers")
        return values

    def positive(self) -> float:
        value = self.number()
        if value <= 0.0:
            raise self.wrong("a positive number")
        return value

    def maybe(self) -> float | None:
        return None if self.value is None else self.number()

    def whole(self) -> int:
        if self.value is not None and type(self.value) is not int:
            raise self.wrong("a whole number")
        return self.value or 0


def _config(tree: _Place) -> ConfigDocument:
    config_id = tree["config_id"].text()
    tree = _Place(tree.value, config_id)
    engines = tree["engines"].places()
    return ConfigDocument(
        config_id,
        {
            key: printable(value) if isinstance(value, str) else value
            for key, value in tree["config"].object().items()
            if isinstance(value, (str, int, float, bool))
        },
        tree["telemetry"].text(),
        len(engines),
        tree["quarantined"].text(),
        {name: _target(name, _Place(each.value, f"{config_id}.{name}")) for name, each in tree["targets"].named()},
        _scheduled_ahead(engines, tree["config"]["async_scheduling"].value),
        tuple(each.text() for each in tree["doubts"].places()),
        tree["last_heard_unix_nano"].whole(),
        bool(tree["replaced_by"].text()),
        tree["prefix_hits_hidden"].value is True,
    )


def _scheduled_ahead(engines: list[_Place], stated: object) -> bool | None:
    """As the engines' steps show, else as a fact says."""
    modes = {each["scheduling"].text() for each in engines if isinstance(each.value, dict)}
    if modes & {"async", "sync"}:
        return "async" in modes
    return stated if isinstance(stated, bool) else None


def _target(name: str, tree: _Place) -> Target:
    context, factor = tree["context_us_per_token"], tree["mean_factor"].maybe()
    return Target(
        name,
        tree["champion"].text(),
        {key: _model(key, _Place(each.value, f"{tree.where}.{key}")) for key, each in tree["models"].named()},
        _interval(tree["interval"]),
        {cell: _shape(each) for cell, each in tree["shape_factors"].named()},
        _seen(tree["seen"]),
        tree["mean_us"].maybe(),
        1.0 if factor is None else factor,
        tree["step_ahead_us"].maybe(),
        None if context.value is None else context.positive(),
        tree["shape_factors_applied"].value is not False,
        {
            phase: Level(level["factor"].positive(), level["last_row_unix_nano"].whole())
            for phase, level in tree["level"].named()
        },
        _change(tree["drift"]),
        _outliers(tree["replicas"].places()),
    )


def _shape(tree: _Place) -> Shape:
    usual = tree["usual"]
    work = None if usual.value is None else MeanWork(*usual.numbers(4))
    return Shape(tree["factor"].positive(), tree["rows"].maybe() or 0.0, work)


def _model(name: str, tree: _Place) -> Model:
    # ``prediction_error`` may be of more than can be computed here: of a correction that is in no other key.
    error = next((tree[key] for key in ("shaped_error", "prediction_error") if tree[key].value), tree["error"])
    coefficients = tuple(_coefficient(each, tree.where) for each in tree["features"].places())
    covariance = tree["covariance"]
    if len(rows := covariance.places()) not in {0, len(coefficients)}:
        raise covariance.wrong(f"{len(coefficients)} rows")
    return Model(
        name,
        coefficients,
        tree["rows"].whole(),
        error["mape"].maybe(),
        error["median_ape"].maybe(),
        tuple(tuple(row.numbers(len(coefficients))) for row in rows),
        tree["error"]["median_ape"].maybe(),
    )


def _coefficient(tree: _Place, where: str) -> Coefficient:
    name = tree["name"].text()
    return Coefficient(
        name,
        tree["unit"].text(),
        _Place(tree["coefficient"].value, f"{where}.{name}").number(),
        tree["stderr"].maybe(),
        tree["status"].text(),
        tree["mean"].maybe(),
        tree["reason"].text(),
        tree["form_error"].maybe(),
    )


def _interval(tree: _Place) -> Interval | None:
    if tree.value is None:
        return None
    strata = {name: each.numbers(3) for name, each in tree["strata"].named()}
    pooled = tree["p10"].number(), tree["p90"].number()
    return Interval(pooled, {name: (p10, p90) for name, (p10, _, p90) in strata.items()})


def _change(tree: _Place) -> SpeedChange | None:
    if tree["gain"].value is None or tree["last_unix_nano"].value is None:
        return None
    added, within_s = tree["added"].maybe(), tree["last_within_s"].maybe()
    return SpeedChange(tree["gain"].positive(), tree["last_unix_nano"].whole(), tree["term"].text(), added, within_s)


def _outliers(replicas: list[_Place]) -> tuple[OutlierReplica, ...]:
    return tuple(
        OutlierReplica(
            each["engine"].text(),
            each["ratio"].positive(),
            each["stderr"].maybe(),
            each["term"].text(),
            each["added"].maybe(),
            len(replicas) - 1,
        )
        for each in replicas
        if each["differs"].value and each["ratio"].value is not None
    )


def _seen(tree: _Place) -> Seen | None:
    if tree.value is None:
        return None
    bounds = {name: each.numbers(2) for name, each in tree["features"].named()}
    cells = frozenset(str(each.value) for each in tree["cells"].places())
    return Seen({name: (lowest, highest) for name, (lowest, highest) in bounds.items()}, cells)
