"""Questions to the coefficients, and their answers in words and as documents: for command line, HTTP and the page.

The tables of parameters stand here once. A parameter of HTTP is the option of the command line without its dashes
(``prefix_hit`` for ``--prefix-hit``); what a number may be is the client's business, and only the client predicts.
Times in a document are microseconds under the keys of the client's results, so that a program needs no second
vocabulary. Nothing heavy is imported: the help of the command line is made of these tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tracefit import BadInputError, Config, Estimate, Plan, Prediction, RequestEstimate, minute

# µ is two signs: the micro sign, and the letter of a Greek keyboard
_UNITS_MS = {"us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(us|µs|μs|ms|s|)")
_WHOLE = re.compile(r"\d{1,13}")
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False}
SHOWN_CHARS = 32
_TIME_UNITS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))
_WHOLE_FROM = 1e3


class Parameter(NamedTuple):
    """One parameter of a question.

    ``kind`` is text, number, whole, time or switch; ``field`` the client's name for it, which has ``default`` where
    the parameter was left out.
    """

    name: str
    kind: str
    meaning: str
    field: str = ""
    default: object = None
    required: bool = False


CONFIG = Parameter("config", "text", "which configuration, where there are several: its id, or words of its name")
NOW = Parameter("now", "switch", "of the next seconds: times the level of the last steps")
STEP = (
    Parameter("prefill", "number", "prefill tokens of the step (0)", "prefill_tokens", 0.0),
    Parameter("requests", "number", "requests in the step", "requests"),
    Parameter(
        "context",
        "number",
        "tokens of decode context of the step (the usual ones of such a batch)",
        "decode_context_tokens",
    ),
)
REQUEST = (
    Parameter("prompt", "number", "prompt tokens of a request", "prompt_tokens"),
    Parameter("output", "number", "output tokens of a request", "output_tokens"),
    Parameter("prefix_hit", "number", "share of the prompt that is cached (0)", "prefix_hit", 0.0),
)
LOAD = (*REQUEST, Parameter("concurrency", "number", "requests in flight (1)", "concurrency", 1.0))
RATE = Parameter("rate", "number", "requests per second that arrive: how many engines do they need", "rate")
TARGETS = (
    Parameter("itl", "time", "mean time between tokens at most, like 30ms", "itl_ms"),
    Parameter("ttft", "time", "mean time to first token at most, like 1s", "ttft_ms"),
    Parameter("safe", "switch", "hold the upper edge of the band against the targets", "safe", default=False),
)
LIMITS = (
    Parameter("max_num_seqs", "whole", "requests in a batch at most"),
    Parameter("max_num_batched_tokens", "whole", "tokens in a step at most"),
    Parameter("kv_tokens", "whole", "tokens that the KV cache holds"),
)
SIZED = (*(each._replace(required=True) for each in REQUEST[:2]), REQUEST[2])
PREDICT = (CONFIG, *STEP, *LOAD, NOW)
PLAN = (CONFIG, *SIZED, RATE, *TARGETS, *LIMITS)
_NAME_OF_FIELD = {each.field: each.name for each in (*PREDICT, *PLAN) if each.field}


# ----------------------------------------------------------------- from text to a question


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


def _number(text: str) -> float:
    try:
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


READERS: Mapping[str, Callable[[str], object]] = {
    "number": _number,
    "whole": _whole,
    "time": milliseconds,
    "switch": _switch,
    "text": str,
}
"""How each kind of parameter is read; a ValueError says what it should be."""


def read_query(query: Mapping[str, str], parameters: tuple[Parameter, ...]) -> dict[str, Any]:
    """The parameters of a URL as numbers, switches and text; those that were left out are not in it.

    Raises:
        BadInputError: a parameter is unknown, missing, or not what it should be.
    """
    by_name = {each.name: each for each in parameters}
    given = {}
    for name, text in query.items():
        if name not in by_name:
            raise BadInputError(name[:SHOWN_CHARS], f"no such parameter; there are {', '.join(by_name)}")
        try:
            given[name] = READERS[by_name[name].kind](text)
        except ValueError as error:
            raise BadInputError(name, str(error)) from None
    for each in parameters:
        if each.required and each.name not in given:
            raise BadInputError(each.name, f"missing: {each.meaning}")
    return given


class Question(NamedTuple):
    """What is asked: a method of the client's configuration, and what it is called with.

    ``query`` has its arguments, a context of None the usual one of such a batch; ``assumed`` are limits of the engine
    that its telemetry lacks.
    """

    method: str
    query: Mapping[str, Any]
    assumed: Mapping[str, int]


def _question(method: str, parameters: tuple[Parameter, ...], given: Mapping[str, Any]) -> Question:
    values = {each.field: each.default if (v := given.get(each.name)) is None else v for each in parameters}
    assumed = {each.name: given[each.name] for each in LIMITS if given.get(each.name) is not None}
    return Question(method, values, assumed)


def read_prediction(given: Mapping[str, Any]) -> Question:
    """The question of ``predict``, from numbers by parameter; a missing one may be None.

    Raises:
        BadInputError: it is neither a step nor a load, or both, or incomplete.
    """
    step, load = ("requests", "prefill", "context"), ("prompt", "output", "concurrency", "prefix_hit")
    of_step, of_load = ([name for name in names if given.get(name) is not None] for names in (step, load))
    if of_step and of_load:
        raise BadInputError(of_load[0], f"a load ({', '.join(load)}) and a step ({', '.join(step)}) are two questions")
    if of_step:
        if not given.get("requests"):
            raise BadInputError("requests", "missing: a step has so many, one at least")
        is_prefill = given.get("prefill") and given.get("context") is None
        return _question("step_time", STEP, {**given, "context": 0.0} if is_prefill else given)
    for name in load[:2]:
        if given.get(name) is None:
            raise BadInputError(name, f"missing: give a load ({', '.join(load)}) or a step ({', '.join(step)})")
    return _question("request", LOAD, given)


def read_plan(given: Mapping[str, Any]) -> Question:
    """The question of ``plan``, from numbers by parameter.

    Raises:
        BadInputError: it names no target, so that anything would fit.
    """
    if all(given.get(name) is None for name in ("itl", "ttft", "rate")):
        raise BadInputError("itl", "missing: give a target: itl, ttft or rate")
    return _question("plan", (*SIZED, RATE, *TARGETS), given)


# ----------------------------------------------------------------- from a question to its answer


LIMIT_WORDS = {
    "itl": "compute: one more request breaks the ITL target",
    "ttft": "compute: one more request breaks the TTFT target",
    "token_budget": "token budget: prefills fill every step",
    "max_num_seqs": "max_num_seqs: the engine runs no more at once",
    "kv_capacity": "KV cache: its blocks hold no more",
    "seen": "no limit is known: beyond the largest batch seen it would be a guess; give max_num_seqs or kv_tokens",
    "none": "nothing that is known; give max_num_seqs or kv_tokens",
}
"""What ends a plan, in words."""


class Answer(NamedTuple):
    """An answer with the configuration that it is of, and the question with the context that was assumed.

    ``idle_since_unix_nano`` is when its engines were last heard of, 0 while they send.
    """

    config: Config
    question: Question
    result: Prediction | RequestEstimate | Plan
    idle_since_unix_nano: int

    @property
    def at(self) -> Prediction | RequestEstimate:
        """What is predicted; of a plan, at the concurrency that fits."""
        return self.result.at if isinstance(self.result, Plan) else self.result

    def lines(self) -> Iterator[tuple[str, str]]:
        """A name and what it is, for people."""
        if isinstance(self.result, Prediction):
            form = (
                "{prefill_tokens:,.0f} prefill tokens, {requests:,.3g} requests, "
                "{decode_context_tokens:,.0f} tokens of decode context"
            )
            yield "step", form.format(**self.question.query)
            yield "takes", with_band(self.result)
        elif isinstance(self.result, RequestEstimate):
            yield from _load_lines(self.result)
        else:
            side = " on the safe side" if self.question.query["safe"] else ""
            yield "fits", f"{counted(self.result.concurrency, 'request')} in flight{side}"
            yield "because", LIMIT_WORDS[self.result.limit]
            yield from _load_lines(self.result.at)
            if self.question.query["rate"] is not None:
                yield "engines", _engines(self.result, self.question.query["rate"])
        if self.config.at_unix_nano is not None:
            decode, prefill = self.config.level
            words = f"×{decode:.3f} without prefill, ×{prefill:.3f} with"
            yield "level", "not used: no step was heard of in the last 10 s" if decode == prefill == 1.0 else words

    def caveats(self) -> Iterator[tuple[str, str]]:
        """Why it should be taken with care: a few words, and what."""
        for reason in self.config.reasons:
            yield self.config.verdict.state, reason
        for clause in self.config.verdict.hidden:
            yield "hidden", clause
        if self.idle_since_unix_nano:
            yield "its engines are silent", f"last heard of {minute(self.idle_since_unix_nano)}"
        if self.at.extrapolated:
            limits = {**self.config.limits._asdict(), **self.question.assumed}
            ranges = {name: f"{low:,.0f} to {high:,.0f} seen" for name, (low, high) in self.config.verdict.seen.items()}
            ranges["shape"] = "no batch of this kind was seen"
            ranges["model"] = "it may be a mixture of experts: set model_config or num_experts"
            ranges |= {name: "unknown" for name, limit in limits.items() if limit is None}
            names = (f"{name} ({ranges[name]})" if name in ranges else name for name in self.at.extrapolated)
            yield f"{'' if self.at.usable else 'not usable, '}outside of what was learned from", ", ".join(names)
        if isinstance(self.at, RequestEstimate) and self.config.missing:
            yield "not in these times, since nothing was learned of it", ", ".join(self.config.missing)

    def document(self) -> dict[str, object]:
        """The answer as plain values."""
        config = self.config
        about: dict[str, object] = {"config_id": config.config_id, "reasons": config.reasons}
        about["hidden"] = config.verdict.hidden
        about["query"] = {**self.question.query, **self.question.assumed}
        if config.at_unix_nano is not None:
            about["level"] = dict(zip(("decode", "prefill"), config.level, strict=True))
        if self.idle_since_unix_nano:
            about["silent_since_unix_nano"] = self.idle_since_unix_nano
        if isinstance(self.at, RequestEstimate):
            about["missing"] = config.missing
        return {**about, **tree_of(self.result)}


def answer_question(config: Config, question: Question, now_unix_nano: int) -> Answer:
    """The client's answer; engines that were not heard of for ten minutes are silent.

    Raises:
        BadInputError: a number makes no sense; it names the parameter.
        NoCoefficientsError: there is nothing to predict with.
    """
    query = dict(question.query)
    if query.get("decode_context_tokens", 0.0) is None:
        query["decode_context_tokens"] = config.mean_context(query["requests"])
    try:
        limited = config.assuming(**question.assumed) if question.assumed else config
        said = getattr(limited, question.method)(**query)
    except BadInputError as error:
        raise BadInputError(_NAME_OF_FIELD.get(error.parameter, error.parameter), error.problem) from None
    return Answer(config, question._replace(query=query), said, config.verdict.silent_since(now_unix_nano))


def answer_query(
    method: str, query: Mapping[str, str], config_of: Callable[[str], Config], now_unix_nano: int
) -> Answer:
    """The answer to the parameters of a URL: ``predict`` or ``plan``, of the configuration that ``config_of`` finds.

    Raises:
        BadInputError, NoCoefficientsError: as :func:`read_query`, the readers and :func:`answer_question`.
    """
    parameters, read = (PLAN, read_plan) if method == "plan" else (PREDICT, read_prediction)
    given = read_query(query, parameters)
    config = config_of(given.get("config", ""))
    return answer_question(config.now(now_unix_nano) if given.get("now") else config, read(given), now_unix_nano)


def _load_lines(said: RequestEstimate) -> Iterator[tuple[str, str]]:
    waiting = f", {said.concurrency - said.running:.3g} wait" if said.concurrency > said.running else ""
    yield "in flight", f"{counted(said.concurrency, 'request')} ({plain(said.running)} run{waiting})"
    for name, value in (("TTFT", said.ttft), ("ITL", said.itl), ("E2E", said.e2e)):
        if value.us > 0.0:  # one token has no time between tokens
            yield name, with_band(value)
    yield "rate", f"{significant(said.requests_per_s)} requests/s, {said.output_tokens_per_s:,.0f} output tokens/s"
    if said.prefill_bound:
        yield "limit", "prefills fill every step: more requests only wait longer"


def _engines(said: Plan, rate: float) -> str:
    if said.replicas is None:
        return f"cannot be said for {rate:g} requests/s: no load keeps the targets"
    engines = "one engine is enough" if said.replicas == 1 else f"{said.replicas} engines are needed"
    return f"{engines} for {rate:g} requests/s"


# ----------------------------------------------------------------- numbers


def tree_of(value: Any) -> Any:
    """A result of the client as plain values, for JSON."""
    if hasattr(value, "_asdict"):
        return tree_of(value._asdict())
    if isinstance(value, Mapping):
        return {key: tree_of(each) for key, each in value.items()}
    return [tree_of(each) for each in value] if isinstance(value, tuple) else value


def as_json(tree: object) -> str:
    """One document, keys in order."""
    return json.dumps(tree, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, plain, without a trailing dot."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "unknown"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of 9.996 as it is rounded
    return f"{value:,.{min(max(digits - 1 - exponent, 0), 12)}f}"


def duration(value_us: float, *, like: float | None = None, digits: int = 3) -> str:
    """Microseconds in the unit that fits them, or a larger value beside them: ``16.8 ms``, ``0.3 ms``."""
    if value_us == 0:
        return "0 µs"
    size = abs(value_us if like is None else like)
    scale, unit = next(((s, u) for s, u in _TIME_UNITS if size >= s), _TIME_UNITS[-1])
    return f"{significant(value_us / scale, digits)} {unit}"


def with_band(value: Estimate | Prediction) -> str:
    """A time and the band that eight of ten fall into."""
    return f"{duration(value.us):<9} (8 of 10: {duration(value.low)} to {duration(value.high)})"


def counted(number: float, noun: str) -> str:
    """``1 request``, ``20 requests``."""
    return f"{plain(number)} {noun}{'' if number == 1 else 's'}"


def plain(number: float) -> str:
    """Four digits, and from a thousand on the whole number."""
    return f"{number:.0f}" if number >= _WHOLE_FROM else f"{number:.4g}"
