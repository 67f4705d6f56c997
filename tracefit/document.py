"""The snapshot document, checked and typed, and the verdict on each configuration: the only module that touches JSON.

Accepted: schema ``tracefit.snapshot/1`` and its minors (``/1.4``), whose unknown keys pass. What a prediction needs is
checked here, once; everything else is left as it was sent. No number that is not finite gets through.

The verdict says whether the numbers of a configuration may be used, how good they are, and what changed. Page, metrics,
log and commands read it and decide nothing of their own, so that all of them say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .exceptions import FINITE_MAX, LoadError, printable
from .selection import IDLE_NS
from .speed_change import OUTLIERS_NAMED, OutlierReplica, SpeedChange

SCHEMA = "tracefit.snapshot/1"
STEP_TIME = "step_time"
Ratios = tuple[float, float]
Tree = Mapping[str, Any]
"""An object of the document."""


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
    """

    name: str
    coefficients: tuple[Coefficient, ...]
    rows: int
    mape: float | None
    median_ape: float | None
    covariance: tuple[tuple[float, ...], ...] = ()

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

    ``shapes`` are by the name of their cell, none while their factors are not applied; ``seen``: lowest and highest
    value of each feature per step; ``cells``, names of those visited (both empty: not known);
    ``mean_factor`` is mean ÷ robust fit; ``step_ahead_us``, the part of the intercept that is a step scheduled
    ahead, 0 where there is none, None where nobody knows; ``context_us_per_token``, what a token of decode context
    costs among steps of about one size, None where nobody said; ``level``, of ``decode`` and ``prefill`` steps;
    ``change``, the newest confirmed change of speed; ``outliers``, the engines of another speed than the others.
    """

    name: str
    champion: str
    models: Mapping[str, Model]
    interval: Interval | None
    shapes: Mapping[str, Shape]
    seen: Mapping[str, Ratios]
    cells: frozenset[str]
    mean_us: float | None
    mean_factor: float
    step_ahead_us: float | None = None
    context_us_per_token: float | None = None
    level: Mapping[str, Level] = _NO_LEVEL
    change: SpeedChange | None = None
    outliers: tuple[OutlierReplica, ...] = ()


ACTIVE_EXPERTS = "active_experts"
"""The feature that counts the share of experts that a step's tokens touch."""


_SIZE = re.compile(r"\d[bB](?![a-zA-Z0-9])")
"""``Llama-3.1-8B``: nobody calls a model so who hides what it is, as ``prod-chat`` does."""


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
    def model_is_known(self) -> bool:
        """Whether it is told if the model is a mixture of experts: by its file, their count, or a name with a size."""
        named = str(self.facts.get("model_root") or self.facts.get("model", ""))
        return not {"num_experts", "hidden_size"}.isdisjoint(self.facts) or bool(_SIZE.search(named))

    @property
    def missed_experts(self) -> float | None:
        """1 - k/E, the share of experts that one token leaves alone; None where they are not known."""
        experts, per_token = self.facts.get("num_experts"), self.facts.get("num_experts_per_tok")
        if type(experts) is not int or type(per_token) is not int or not 0 < per_token <= experts:
            return None
        return 1.0 - per_token / experts


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
    """Something to look at, in one clause.

    Attributes:
        text: the clause.
        is_defect: something failed, and waiting does not mend it.
        key: what makes it another one than before; empty: its text, whatever the numbers in it.
    """

    text: str
    is_defect: bool = False
    key: str = ""


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

    def silent_since(self, now_unix_nano: int) -> int:
        """When its engines were last heard of, if they are gone: replaced, or silent for ten minutes. Else 0."""
        is_gone = self.replaced or now_unix_nano - self.last_heard_unix_nano > IDLE_NS
        return self.last_heard_unix_nano if is_gone else 0

    def problems(self, now_unix_nano: int) -> tuple[Problem, ...]:
        """What a person should hear first: what failed, what is in doubt, what changed within a day."""
        problems = [Problem("quarantined, its learner failed", is_defect=True)] if self.quarantined else []
        problems += [Problem(f"not usable: {doubt}", is_defect=True) for doubt in self.doubts]
        if self.change is not None and self.change.is_recent(now_unix_nano) and not self.replaced:
            change = self.change
            problems.append(Problem(change.text(now_unix_nano), key=f"{change.since_unix_nano} {change.term}"))
        return (*problems, *(Problem(each.text, key=f"{each.engine} {each.term}") for each in self.outliers))


def judged(config: ConfigDocument, reasons: tuple[str, ...], model: Model | None) -> Verdict:
    """The verdict; ``model`` predicts its steps, and ``reasons`` speak against it."""
    step = config.targets.get(STEP_TIME)
    spans = config.facts.get("trace_sampling")
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
        outliers=() if step is None else step.outliers[:OUTLIERS_NAMED],
        seen={} if step is None else step.seen,
        hidden=tuple(filter(None, hidden)),
    )


# ------------------------------------------------------------------- reading it


def parse(data: bytes, where: str) -> tuple[int, int, str, tuple[ConfigDocument, ...]]:
    """Generation of a snapshot, when it was made, by which version of tracefit, and its configurations.

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
        raise LoadError(
            f"{where} has schema {schema[:64]!r}; this version reads {SCHEMA}, so take the one that wrote it"
        )
    try:
        return (
            _whole(tree, "generation"),
            _whole(tree, "created_unix_nano"),
            _text(tree, "tracefit_version"),
            tuple(map(_config, tree["configs"])),
        )
    except ValueError as error:
        raise LoadError(f"{where} is not a snapshot: {error}") from None
    except (AttributeError, KeyError, TypeError):  # a list where an object should be, or too short a one
        raise LoadError(f"{where} is not a snapshot: a part of it has another form") from None


def _text(tree: Tree, key: str) -> str:
    return printable(str(tree.get(key) or ""))


def _whole(tree: Tree, key: str) -> int:
    value: Any = tree.get(key, 0)
    if type(value) is not int or abs(value) > FINITE_MAX:
        raise ValueError(f"expected a whole number, got {printable(str(value))!r}")
    return value


def _number(value: Any) -> float:
    if type(value) not in {int, float} or not abs(value) < FINITE_MAX:
        raise ValueError(f"expected a finite number, got {printable(str(value))!r}")
    return float(value)


def _maybe(tree: Tree, key: str) -> float | None:
    return None if (value := tree.get(key)) is None else _number(value)


def _parts(tree: Tree, key: str) -> Tree:
    """An object in another, empty where there is none."""
    part: Tree = tree.get(key) or {}
    return part


def _config(tree: Tree) -> ConfigDocument:
    engines, facts = tree.get("engines") or (), _parts(tree, "config")
    return ConfigDocument(
        _text(tree, "config_id"),
        {
            key: printable(value) if isinstance(value, str) else value
            for key, value in facts.items()
            if isinstance(value, (str, int)) or (isinstance(value, float) and abs(value) < FINITE_MAX)
        },
        _text(tree, "telemetry"),
        len(engines),
        _text(tree, "quarantined"),
        {name: _target(name, each) for name, each in _parts(tree, "targets").items()},
        _scheduled_ahead(engines, facts.get("async_scheduling")),
        tuple(printable(str(each)) for each in tree.get("doubts") or ()),
        _whole(tree, "last_heard_unix_nano"),
        bool(tree.get("replaced_by")),
        tree.get("prefix_hits_hidden") is True,
    )


def _scheduled_ahead(engines: Iterable[Tree], stated: object) -> bool | None:
    """As the engines' steps show, else as a fact says."""
    modes = {str(each.get("scheduling")) for each in engines}
    if modes & {"async", "sync"}:
        return "async" in modes
    return stated if isinstance(stated, bool) else None


def _target(name: str, tree: Tree) -> Target:
    factor, seen = _maybe(tree, "mean_factor"), _parts(tree, "seen")
    shapes = {} if tree.get("shape_factors_applied") is False else _parts(tree, "shape_factors")
    return Target(
        name,
        _text(tree, "champion"),
        {key: _model(key, each) for key, each in _parts(tree, "models").items()},
        _interval(tree.get("interval")),
        {cell: _shape(each) for cell, each in shapes.items()},
        {name: (_number(low), _number(high)) for name, (low, high) in _parts(seen, "features").items()},
        frozenset(map(str, seen.get("cells") or ())),
        _maybe(tree, "mean_us"),
        1.0 if factor is None else factor,
        _maybe(tree, "step_ahead_us"),
        _maybe(tree, "context_us_per_token"),
        {
            phase: Level(_number(level["factor"]), _whole(level, "last_row_unix_nano"))
            for phase, level in _parts(tree, "level").items()
        },
        _change(_parts(tree, "drift")),
        _outliers(tree.get("replicas") or ()),
    )


def _shape(tree: Tree) -> Shape:
    usual = tree.get("usual")
    work = None if usual is None else MeanWork(*map(_number, usual))
    return Shape(_number(tree["factor"]), _maybe(tree, "rows") or 0.0, work)


def _model(name: str, tree: Tree) -> Model:
    # ``prediction_error`` may be of more than can be computed here: of a correction that is in no other key.
    errors = (_parts(tree, key) for key in ("shaped_error", "prediction_error", "error"))
    error = next(filter(None, errors), {})
    coefficients = tuple(map(_coefficient, tree.get("features") or ()))
    covariance = tuple(tuple(map(_number, row)) for row in tree.get("covariance") or ())
    if covariance and [*map(len, covariance)] != [len(coefficients)] * len(coefficients):
        raise ValueError("expected a covariance of all coefficients")
    return Model(
        name,
        coefficients,
        _whole(tree, "rows"),
        _maybe(error, "mape"),
        _maybe(error, "median_ape"),
        covariance,
    )


def _coefficient(tree: Tree) -> Coefficient:
    return Coefficient(
        _text(tree, "name"),
        _text(tree, "unit"),
        _number(tree["coefficient"]),
        _maybe(tree, "stderr"),
        _text(tree, "status"),
        _maybe(tree, "mean"),
        _text(tree, "reason"),
        _maybe(tree, "form_error"),
    )


def _interval(tree: Tree | None) -> Interval | None:
    if tree is None:
        return None
    strata = {name: (_number(p10), _number(p90)) for name, (p10, _, p90) in _parts(tree, "strata").items()}
    return Interval((_number(tree["p10"]), _number(tree["p90"])), strata)


def _change(tree: Tree) -> SpeedChange | None:
    if tree.get("gain") is None or tree.get("last_unix_nano") is None:
        return None
    return SpeedChange(
        _number(tree["gain"]),
        _whole(tree, "last_unix_nano"),
        _text(tree, "term"),
        _maybe(tree, "added"),
        _maybe(tree, "last_within_s"),
    )


def _outliers(replicas: Sequence[Tree]) -> tuple[OutlierReplica, ...]:
    return tuple(
        OutlierReplica(
            _text(each, "engine"),
            _number(each["ratio"]),
            _maybe(each, "stderr"),
            _text(each, "term"),
            _maybe(each, "added"),
            len(replicas) - 1,
        )
        for each in replicas
        if each.get("differs") and each.get("ratio") is not None
    )
