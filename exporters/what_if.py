"""Questions to the coefficients and their answers: read from text, answered by the client library, written as JSON.

Command line, HTTP and the page read a question here. A parameter of HTTP is the option of the command line without its
dashes (``prefix_hit`` for ``--prefix-hit``). What a number may be is the client's business; here text becomes numbers,
and it is seen whether a question is complete. Every time in an answer is in microseconds and the keys are those of the
client's results, so that a program that reads one needs no second vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from tracefit import BadInputError, Config, NoCoefficientsError, Plan, Prediction, RequestEstimate


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
    """A step to be predicted."""

    prefill_tokens: float
    requests: float
    decode_context_tokens: float


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


_CONFIG = Parameter("config", "text", "config_id, its beginning, or words of its name; needed if there are more")
_REQUEST = (
    Parameter("prompt", "number", "prompt tokens of a request", field="prompt_tokens"),
    Parameter("output", "number", "output tokens of a request", field="output_tokens"),
)
_PREFIX_HIT = Parameter("prefix_hit", "number", "share of prompts cached (0)")
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
    Parameter("itl", "time", "largest mean time between tokens, like 30ms", field="itl_ms"),
    Parameter("ttft", "time", "largest mean time to first token, like 1s", field="ttft_ms"),
    Parameter("rate", "number", "requests per second that arrive: how many engines do they need"),
    Parameter("safe", "switch", "hold the upper edge of the interval against the targets"),
    *(
        Parameter(name, "whole", "a limit of the engine that its telemetry did not tell")
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens")
    ),
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
        return Step(given.get("prefill") or 0.0, given["requests"], given.get("context") or 0.0)
    for name in load[:2]:
        if given.get(name) is None:
            raise QuestionError(name, f"missing: give a load ({', '.join(load)}) or a step ({', '.join(step)})")
    concurrency = given.get("concurrency")
    hit = given.get("prefix_hit")
    return Load(
        given["prompt"], given["output"], 1.0 if concurrency is None else concurrency, 0.0 if hit is None else hit
    )


def read_sizing(given: Mapping[str, Any]) -> Sizing:
    """The question of ``plan``, from numbers by parameter."""
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
    if caveats := config.caveats(answer.extrapolated):
        about["caveats"] = list(caveats)
    return about


def _tree(answer: Prediction | RequestEstimate) -> dict[str, object]:
    return {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in answer._asdict().items()}
