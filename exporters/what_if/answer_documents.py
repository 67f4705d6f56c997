"""Answers of the client, and their JSON: the same on the command line and over HTTP.

Every time is in microseconds and the keys are those of the client's results, so that a program that reads one needs no
second vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TypeVar

from exporters.what_if.asked import Load, QuestionError, Sizing, Step, parameter_of
from tracefit import BadInputError, Config, NoCoefficientsError, Plan, Prediction, RequestEstimate

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
    if caveats := config.caveats(answer.extrapolated):
        about["caveats"] = list(caveats)
    return about


def _tree(answer: Prediction | RequestEstimate) -> dict[str, object]:
    return {key: value._asdict() if hasattr(value, "_asdict") else value for key, value in answer._asdict().items()}
