"""The what-if form: how many requests fit, what they see at a load, what a step costs; a plain GET form without script.

It asks the page itself, so that question and answer are one address; beside the answer stands that of the same question
as JSON. The section is not ``data-live``: the script that refreshes the page must not empty a half-filled form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from exporters.client_view import ClientView
from exporters.config_section import config_title
from exporters.what_if import (
    LIMIT_WORDS,
    PLAN,
    PREDICT,
    QuestionError,
    planned,
    predicted,
    read_query,
    read_sizing,
    read_step_or_load,
)
from exporters.wording import count, duration, escape, significant
from online import ConfigSnapshot, Snapshot
from tracefit import Config, Estimate, Prediction, RequestEstimate, TracefitError

MAX_CHOICES = 200
_ASK = "ask"


class _Form(NamedTuple):
    """One question: what it asks, its inputs (parameter, label, example), button and switches (parameter, label)."""

    question: str
    path: str
    title: str
    inputs: tuple[tuple[str, str, str], ...]
    button: str
    switches: tuple[tuple[str, str], ...] = ()


_REQUEST = (("prompt", "prompt tokens", "2000"), ("output", "output tokens", "300"))
_PREFIX_HIT = ("prefix_hit", "share of prompts cached", "0.4")
_FORMS = (
    _Form(
        "plan",
        "/plan",
        "How many requests fit?",
        (
            *_REQUEST,
            _PREFIX_HIT,
            ("itl", "ITL at most", "30ms"),
            ("ttft", "TTFT at most", "1s"),
            ("rate", "requests/s", "3"),
        ),
        "Plan",
        (("safe", "upper end of the band within the targets"),),
    ),
    _Form(
        "load",
        "/predict",
        "What do requests see?",
        (*_REQUEST, _PREFIX_HIT, ("concurrency", "requests in flight", "20")),
        "Predict requests",
    ),
    _Form(
        "step",
        "/predict",
        "What does a step cost?",
        (("requests", "requests", "20"), ("prefill", "prefill tokens", "512"), ("context", "decode context", "30000")),
        "Predict step",
    ),
)


def what_if_section(snapshot: Snapshot, view: ClientView, query: Mapping[str, str]) -> str:
    """The forms, and the answer if the page's address asks.

    Args:
        snapshot: the configurations to choose from.
        view: answers.
        query: of the page's address; ``ask`` names the question.
    """
    forms = "".join(_form(form, snapshot.configs, query) for form in _FORMS)
    doubts = "".join(_doubts(snapshot, view))
    asked = next((form for form in _FORMS if form.question == query.get(_ASK)), None)
    answer = "" if asked is None else _answer(asked, snapshot, view, query)
    return (
        '<section id="what-if" aria-labelledby="what-if-title"><h2 id="what-if-title">What if</h2>'
        f'{doubts}{answer}<div class="asks">{forms}</div></section>'
    )


def _doubts(snapshot: Snapshot, view: ClientView) -> Iterator[str]:
    """Why ``tracefit_usable`` is 0, of as many configurations as can be chosen."""
    for each in snapshot.configs[:MAX_CHOICES]:
        try:
            reasons = view.config(snapshot, each.config_id).reasons
        except TracefitError as error:
            reasons = (str(error),)
        if reasons:
            name = f"{config_title(each)} ({each.config_id})"
            yield f'<p class="quiet">{escape(name)} is not usable yet: {escape("; ".join(reasons))}</p>'


def _form(form: _Form, configs: Sequence[ConfigSnapshot], query: Mapping[str, str]) -> str:
    chosen = query.get("config", "")
    fields = [_choice(configs, chosen)] if len(configs) > 1 else []
    asked = query.get(_ASK) == form.question
    for name, label, example in form.inputs:
        value = escape(query.get(name, "")) if asked else ""
        fields.append(
            f'<label>{label} <input name="{name}" value="{value}" placeholder="{example}" size="8" '
            'autocomplete="off" inputmode="text"></label>'
        )
    for name, label in form.switches:
        checked = " checked" if asked and query.get(name) else ""
        fields.append(f'<label>{label} <input type="checkbox" name="{name}" value="true"{checked}></label>')
    return (
        f'<form method="get" action="/#what-if"><fieldset><legend>{form.title}</legend>{"".join(fields)}'
        f'<button name="{_ASK}" value="{form.question}">{form.button}</button></fieldset></form>'
    )


def _choice(configs: Sequence[ConfigSnapshot], chosen: str) -> str:
    options = "".join(
        f'<option value="{escape(each.config_id)}"{" selected" if each.config_id == chosen else ""}>'
        f"{escape(config_title(each))} ({escape(each.config_id)})</option>"
        for each in configs[:MAX_CHOICES]
    )
    return f'<label>configuration <select name="config">{options}</select></label>'


def _answer(form: _Form, snapshot: Snapshot, view: ClientView, query: Mapping[str, str]) -> str:
    wanted = {name: value for name, value in query.items() if name != _ASK}
    try:
        given = read_query(wanted, PLAN if form.question == "plan" else PREDICT)
        config = view.config(snapshot, given.get("config", ""))
        lines = list(_plan_lines(config, given) if form.question == "plan" else _predict_lines(config, given))
    except (QuestionError, TracefitError) as error:
        return f'<div class="quality poor" role="alert"><p>{escape(error)}</p></div>'
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in lines)
    same = escape(f"{form.path}?{urlencode(wanted)}")
    return f'<dl class="numbers" id="answer">{cells}</dl><p class="quiet"><a href="{same}">the same as JSON</a></p>'


def _plan_lines(config: Config, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    plan = planned(config, read_sizing(given))
    yield "fits", f"{plan.concurrency} requests in flight" if plan.concurrency else "not even one; alone it sees"
    yield "because", LIMIT_WORDS[plan.limit]
    yield from _load_lines(plan.at)
    if plan.replicas is not None:
        yield "engines for that rate", count(plan.replicas)
    yield from _caveats(config, plan.at.extrapolated)


def _predict_lines(config: Config, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    answer = predicted(config, read_step_or_load(given))
    if isinstance(answer, Prediction):
        yield "step", _with_band(answer)
    else:
        yield "in flight", f"{answer.concurrency:.4g}, of them {answer.running:.4g} run"
        yield from _load_lines(answer)
    yield from _caveats(config, answer.extrapolated)


def _load_lines(answer: RequestEstimate) -> Iterator[tuple[str, str]]:
    for name, value in (("TTFT", answer.ttft), ("ITL", answer.itl), ("E2E", answer.e2e)):
        yield name, _with_band(value)
    yield "requests/s", significant(answer.requests_per_s)
    yield "output tokens/s", count(answer.output_tokens_per_s)


def _with_band(value: Estimate | Prediction) -> str:
    return f"{duration(value.us)} (8 of 10: {duration(value.low)} to {duration(value.high)})"


def _caveats(config: Config, extrapolated: Sequence[str]) -> Iterator[tuple[str, str]]:
    if config.reasons:
        yield "not usable yet", "; ".join(config.reasons)
    if extrapolated:
        yield "outside of what was learned from", ", ".join(extrapolated)
    if caveats := config.caveats(extrapolated):
        yield "not usable there", "; ".join(caveats)
