"""Questions to the coefficients and their answers: read from text, answered by the client library, written as JSON.

Whatever predicts asks the client, by way of the newest snapshot as a document, so that nothing here predicts by sums
of its own. What is made of one generation is kept until the next.

Command line, HTTP and the page read a question here. A parameter of HTTP is the option of the command line without its
dashes (``prefix_hit`` for ``--prefix-hit``). What a number may be is the client's business; here text becomes numbers,
and it is seen whether a question is complete. Every time in an answer is in microseconds and the keys are those of the
client's results, so that a program that reads one needs no second vocabulary.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tracefit
from online import ConfigSnapshot, Snapshot
from tracefit import BadInputError, Config, NoCoefficientsError, Plan, Prediction, RequestEstimate, TracefitError

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class PerGeneration(Generic[Key, Made]):
    """Things made of one generation, by key; those of an earlier one are dropped. Keys have to be bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: Snapshot | None = None
        self._made: dict[Key, Made] = {}

    def get(self, source: Callable[[], Snapshot | None], key: Key, make: Callable[[Snapshot | None], Made]) -> Made:
        """What ``make`` makes of the snapshot that ``source`` returns; what it raises, and None, is not kept."""
        with self._lock:
            snapshot = source()
            if snapshot is not self._shown:
                self._shown, self._made = snapshot, {}
            made = self._made.get(key)
            if made is None:
                made = make(snapshot)
                if made is not None:
                    self._made[key] = made
            return made


def client_config(config: ConfigSnapshot) -> tracefit.Config:
    """One configuration, by way of the document that the client reads.

    Raises:
        LoadError: the document is not what the client expects.
    """
    document = Snapshot(generation=0, created_unix_nano=0, tracefit_version="", configs=[config])
    try:
        return tracefit.load(document.to_json()).configs[0]
    except UnicodeEncodeError:
        raise tracefit.LoadError(f"a name in configuration {config.config_id} is no text") from None


def index_of(configs: Sequence[ConfigSnapshot], which: str) -> int:
    """Which of them is meant, as ``find_config`` of the client understands it.

    Raises:
        NotFoundError: none is, or several that are alive.
    """
    return tracefit.find_config(
        [(each.config_id, each.config) for each in configs],
        which,
        heard_unix_nano=[each.last_heard_unix_nano for each in configs],
        replaced=[bool(each.replaced_by) for each in configs],
    )


class ClientView:
    """Configurations of the newest snapshot.

    Args:
        source: returns the newest snapshot, or None before the first; what is shown at the moment.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self.snapshot = source
        self._configs = PerGeneration[str, tracefit.Config]()

    def config(self, snapshot: Snapshot, which: str = "") -> tracefit.Config:
        """The only configuration that is meant, as ``find_config`` of the client understands it.

        Raises:
            NotFoundError: none is, or several that are alive.
            LoadError: the client cannot read it.
        """
        configs = snapshot.configs
        meant = next((each for each in configs if each.config_id == which), None)
        if meant is None:
            meant = configs[index_of(configs, which)]
        return self._configs.get(lambda: snapshot, meant.config_id, lambda _: client_config(meant))


class Mix(NamedTuple):
    """The requests of the last minutes, in the mean, per engine.

    Attributes:
        prompt_tokens, output_tokens: of a finished request.
        prefix_hit: share of prompt tokens that were never computed; 0 where that is not known.
        concurrency: requests in flight, as a decoding request meets them, itself included.
        itl_us: between the tokens of a request, by tokens; None where nothing was observed.
        ttft_us: from queued in the engine to the first token; None where nothing was observed.
    """

    prompt_tokens: float
    output_tokens: float
    prefix_hit: float
    concurrency: float
    itl_us: float | None
    ttft_us: float | None


MixOf = Callable[[str], Mix | None]
"""Of a configuration by its id; None where nothing was finished lately."""


# µ is two signs: the micro sign, and the letter of a Greek keyboard
_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(us|µs|μs|ms|s|)")
_WHOLE = re.compile(r"\d{1,13}")
SHOWN_CHARS = 32
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class QuestionError(ValueError):
    """A question that cannot be read; ``parameter`` is the one to mend."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


class Step(NamedTuple):
    """A step to be predicted; a context of None is the usual one of such a batch, see :func:`complete`."""

    prefill_tokens: float
    requests: float
    decode_context_tokens: float | None


class Load(NamedTuple):
    """Requests in flight to be predicted."""

    prompt_tokens: float
    output_tokens: float
    concurrency: float
    prefix_hit: float = 0.0


class Targets(NamedTuple):
    """What a plan should hold; the fields are those of :meth:`tracefit.Config.plan`."""

    prompt_tokens: float
    output_tokens: float
    itl_ms: float | None = None
    ttft_ms: float | None = None
    rate: float | None = None
    prefix_hit: float = 0.0
    safe: bool = False


class Assumed(NamedTuple):
    """Limits that the telemetry did not tell; see :meth:`tracefit.Config.assuming`."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None


class Sizing(NamedTuple):
    """How many requests fit: the targets, and what is assumed of the engine."""

    targets: Targets
    assumed: Assumed = Assumed()


class Parameter(NamedTuple):
    """One parameter of a question; ``field`` is the client's name for it, where that is another."""

    name: str
    kind: str
    meaning: str
    required: bool = False
    field: str = ""


_CONFIG = Parameter("config", "text", "which configuration, where there are several: its id, or words of its name")
_REQUEST = (
    Parameter("prompt", "number", "prompt tokens of a request", field="prompt_tokens"),
    Parameter("output", "number", "output tokens of a request", field="output_tokens"),
)
_PREFIX_HIT = Parameter("prefix_hit", "number", "share of the prompt that is cached (0)")
PREDICT = (
    _CONFIG,
    Parameter("prefill", "number", "prefill tokens of the step", field="prefill_tokens"),
    Parameter("requests", "number", "requests in the step"),
    Parameter("context", "number", "tokens of decode context of the step", field="decode_context_tokens"),
    *_REQUEST,
    _PREFIX_HIT,
    Parameter("concurrency", "number", "requests in flight"),
    Parameter("now", "switch", "of the next seconds: times the level of the last steps"),
)
PLAN = (
    _CONFIG,
    *(each._replace(required=True) for each in _REQUEST),
    _PREFIX_HIT,
    Parameter("itl", "time", "mean time between tokens at most, like 30ms", field="itl_ms"),
    Parameter("ttft", "time", "mean time to first token at most, like 1s", field="ttft_ms"),
    Parameter("rate", "number", "requests per second that arrive: how many engines do they need"),
    Parameter("safe", "switch", "hold the upper edge of the band against the targets"),
    Parameter("max_num_seqs", "whole", "requests in a batch at most"),
    Parameter("max_num_batched_tokens", "whole", "tokens in a step at most"),
    Parameter("kv_tokens", "whole", "tokens that the KV cache holds"),
)
_NAME_OF_FIELD = {each.field: each.name for each in (*PREDICT, *PLAN) if each.field}


def parameter_of(field: str) -> str:
    """The parameter behind one of the client's names."""
    return _NAME_OF_FIELD.get(field, field)


def milliseconds(text: str) -> float:
    """Read ``30ms``, ``1.5s``, ``900µs``, ``900us``; a number alone is milliseconds.

    Raises:
        ValueError: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    value_ms = 0.0 if match is None else float(match[1]) * _UNITS_MS[match[2]]
    if value_ms <= 0.0:
        raise ValueError(f"{text[:SHOWN_CHARS]!r} is no time like 30ms or 1.5s")
    return value_ms


def read_query(query: Mapping[str, str], parameters: tuple[Parameter, ...]) -> dict[str, Any]:
    """The parameters of a URL as numbers, switches and text; those that were left out are not in it.

    Raises:
        QuestionError: a parameter is unknown, missing, or not what it should be.
    """
    by_name = {each.name: each for each in parameters}
    given = {}
    for name, text in query.items():
        if name not in by_name:
            raise QuestionError(name[:SHOWN_CHARS], f"no such parameter; there are {', '.join(by_name)}")
        try:
            given[name] = _READERS[by_name[name].kind](text)
        except ValueError as error:
            raise QuestionError(name, str(error)) from None
    for each in parameters:
        if each.required and each.name not in given:
            raise QuestionError(each.name, f"missing: {each.meaning}")
    return given


def read_step_or_load(given: Mapping[str, Any]) -> Step | Load:
    """The question of ``predict``, from numbers by parameter; a missing one may be None.

    Raises:
        QuestionError: it is neither a step nor a load, or both, or incomplete.
    """
    step, load = ("requests", "prefill", "context"), ("prompt", "output", "concurrency")
    of_step, of_load = ([name for name in names if given.get(name) is not None] for names in (step, load))
    if of_step and of_load:
        raise QuestionError(of_load[0], f"a load ({', '.join(load)}) and a step ({', '.join(step)}) are two questions")
    if of_step:
        if given.get("prefix_hit") is not None:
            raise QuestionError("prefix_hit", "a step has none: its prefill tokens are those that are computed")
        if given.get("requests") is None:
            raise QuestionError("requests", "missing: a step has so many")
        prefill, context = given.get("prefill") or 0.0, given.get("context")
        return Step(prefill, given["requests"], 0.0 if context is None and prefill else context)
    for name in load[:2]:
        if given.get(name) is None:
            raise QuestionError(name, f"missing: give a load ({', '.join(load)}) or a step ({', '.join(step)})")
    concurrency = given.get("concurrency")
    hit = given.get("prefix_hit")
    return Load(
        given["prompt"], given["output"], 1.0 if concurrency is None else concurrency, 0.0 if hit is None else hit
    )


def read_sizing(given: Mapping[str, Any]) -> Sizing:
    """The question of ``plan``, from numbers by parameter.

    Raises:
        QuestionError: it names no target, so that anything would fit.
    """
    if all(given.get(name) is None for name in ("itl", "ttft", "rate")):
        raise QuestionError("itl", "missing: give a target: itl, ttft or rate")
    targets = Targets(
        given["prompt"],
        given["output"],
        itl_ms=given.get("itl"),
        ttft_ms=given.get("ttft"),
        rate=given.get("rate"),
        prefix_hit=given.get("prefix_hit") or 0.0,
        safe=bool(given.get("safe")),
    )
    return Sizing(targets, Assumed(*(given.get(name) for name in Assumed._fields)))


def _number(text: str) -> float:
    try:
        if not text.isascii() or "_" in text:  # Python's own numbers, which no other reader of the page knows
            raise ValueError
        return float(text)
    except ValueError:
        raise ValueError(f"expected a number, got {text[:SHOWN_CHARS]!r}") from None


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(f"expected a whole number, got {text[:SHOWN_CHARS]!r}")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError(f"expected true or false, got {text[:SHOWN_CHARS]!r}")
    return _SWITCH[text.lower()]


_READERS: Mapping[str, Callable[[str], object]] = {
    "number": _number,
    "whole": _whole,
    "time": milliseconds,
    "switch": _switch,
    "text": str,
}


_Answer = TypeVar("_Answer", Prediction, RequestEstimate, Plan)

LIMIT_WORDS = {
    "itl": "compute: one more request breaks the ITL target",
    "ttft": "compute: one more request breaks the TTFT target",
    "token_budget": "token budget: prefills fill every step",
    "max_num_seqs": "max_num_seqs: the engine runs no more at once",
    "kv_capacity": "KV cache: its blocks hold no more",
    "none": "nothing that is known; give max_num_seqs or kv_tokens",
}
"""What ends a plan, in words."""


def complete(config: Config, question: Step | Load) -> Step | Load:
    """The question with the usual context of such a batch, where a step of decodes was asked for without one."""
    if isinstance(question, Step) and question.decode_context_tokens is None:
        return question._replace(decode_context_tokens=config.usual_context(question.requests))
    return question


def predicted(config: Config, question: Step | Load) -> Prediction | RequestEstimate:
    """What one step costs, or what requests see at a load.

    Raises:
        QuestionError: a number makes no sense; it names the parameter.
        NoCoefficientsError: there is nothing to predict with, or what there is leads to no finite number.
    """
    if isinstance(question, Step):
        return _answered(config, lambda: config.step_time(**question._asdict()))
    return _answered(config, lambda: config.request(**question._asdict()))


def planned(config: Config, question: Sizing) -> Plan:
    """How many requests fit; raises as :func:`predicted`."""
    return _answered(config, lambda: config.assuming(**question.assumed._asdict()).plan(**question.targets._asdict()))


def _answered(config: Config, ask: Callable[[], _Answer]) -> _Answer:
    try:
        answer = ask()
    except BadInputError as error:
        problem = str(error).removeprefix(f"{error.parameter}: ")
        raise QuestionError(parameter_of(error.parameter), problem) from None
    except OverflowError:
        answer = None
    if answer is None or not _finite(answer):
        raise NoCoefficientsError(
            f"the coefficients of configuration {config.config_id} are too large for this question"
        )
    return answer


def _finite(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def caveats(config: Config, answer: Prediction | RequestEstimate) -> Iterator[tuple[str, str]]:
    """Why an answer should be taken with care: a few words, and what."""
    for reason in config.reasons:
        yield "not usable yet", reason
    if answer.extrapolated:
        ranges = config.verdict.seen
        names = (
            f"{name} ({ranges[name][0]:,.0f} to {ranges[name][1]:,.0f} seen)" if name in ranges else name
            for name in answer.extrapolated
        )
        yield "outside of what was learned from", ", ".join(names)
    if isinstance(answer, RequestEstimate) and config.missing:
        yield "not in these times, since nothing was learned of it", ", ".join(config.missing)


def predict_document(config: Config, question: Step | Load, answer: Prediction | RequestEstimate) -> dict[str, object]:
    """The answer of :func:`predicted` as a tree."""
    return {**_about(config, question._asdict(), answer), **_tree(answer)}


def plan_document(config: Config, question: Sizing, answer: Plan) -> dict[str, object]:
    """The answer of :func:`planned` as a tree."""
    assumed = {name: value for name, value in question.assumed._asdict().items() if value is not None}
    return {
        **_about(config, {**question.targets._asdict(), **assumed}, answer.at),
        **answer._asdict(),
        "at": _tree(answer.at),
        "curve": [_tree(each) for each in answer.curve],
        "at_rate": None if answer.at_rate is None else _tree(answer.at_rate),
    }


def as_json(tree: object) -> str:
    """One document, keys in order."""
    return json.dumps(tree, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)


def _about(config: Config, asked: dict[str, object], answer: Prediction | RequestEstimate) -> dict[str, object]:
    about: dict[str, object] = {"config_id": config.config_id, "reasons": list(config.reasons), "asked": asked}
    if config.at_unix_nano is not None:
        decode, prefill = config.level or (1.0, 1.0)
        about["level"] = {"decode": decode, "prefill": prefill, "age_s": config.level_age_s}
    if isinstance(answer, RequestEstimate):
        about["missing"] = list(config.missing)
    return about


def _tree(answer: Prediction | RequestEstimate) -> dict[str, object]:
    return {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in answer._asdict().items()}


BATCH_REACH = 1.25
"""Times the largest batch seen: a plan that needs more is a guess about steps that nobody has met."""


class Fit(NamedTuple):
    """Most requests in flight that keep an ITL; ``safe`` with the upper end of its band; None beyond what was seen."""

    itl_ms: float
    concurrency: int | None
    safe: int | None


class LoadView(NamedTuple):
    """What the coefficients say of the load of the last minutes.

    ``config``: as the client has it. ``mix``: what was observed, None where nothing was finished. ``seen``: what such
    requests should see at that load, None where the coefficients should not be used. ``fits``: per target for ITL.
    """

    config: Config
    mix: Mix | None = None
    seen: RequestEstimate | None = None
    fits: tuple[Fit, ...] = ()


class Advisory:
    """Advice on each configuration, made once a generation.

    Where coefficients should not be used yet there is no advice: an autoscaler without a metric stays as it is. So it
    is for a concurrency whose point is not usable, or that lies beyond BATCH_REACH times the largest batch seen. Such a
    concurrency is left out and not capped: capped, it would follow the load of the past. A pod that met its usual load
    would then look full, new pods would meet less, look full at less, and the autoscaler would go on to its limit.

    Args:
        view: predicts.
        mix_of: what a configuration was asked lately.
        itl_ms: targets for the mean time between tokens.
    """

    def __init__(self, view: ClientView, mix_of: MixOf = lambda _: None, itl_ms: Sequence[float] = ()) -> None:
        self.view = view
        self._mix_of = mix_of
        self._itl_ms = itl_ms
        self._made = PerGeneration[str, LoadView]()

    def of(self, snapshot: Snapshot, config: ConfigSnapshot) -> LoadView:
        """What can be said of one configuration.

        Raises:
            TracefitError: the client cannot read it.
        """
        return self._made.get(lambda: snapshot, config.config_id, lambda _: self._of(snapshot, config))

    def _of(self, snapshot: Snapshot, config: ConfigSnapshot) -> LoadView:
        client = self.view.config(snapshot, config.config_id)
        mix = self._mix_of(config.config_id)
        if mix is None or not client.verdict.usable:
            return LoadView(client, mix)
        request = {
            "prompt_tokens": mix.prompt_tokens,
            "output_tokens": mix.output_tokens,
            "prefix_hit": mix.prefix_hit,
        }
        try:
            now = client.now(snapshot.created_unix_nano)  # a plan is for more than seconds, and has no level
            seen = now.request(concurrency=mix.concurrency, **request)
            fits = tuple(
                Fit(
                    itl_ms,
                    *(_fitting(client, client.plan(itl_ms=itl_ms, safe=safe, **request)) for safe in (False, True)),
                )
                for itl_ms in self._itl_ms
            )
        except TracefitError:  # a mix that the engine cannot hold, or that makes no sense: no advice
            return LoadView(client, mix)
        return LoadView(client, mix, seen, fits)


def _fitting(client: Config, plan: Plan) -> int | None:
    largest = client.verdict.seen.get("requests", (0.0, 0.0))[1]
    return plan.concurrency if plan.at.usable and plan.concurrency <= BATCH_REACH * largest else None
