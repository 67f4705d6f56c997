"""``/predict`` and ``/plan``: the questions of the command line, over HTTP.

The work is bounded by the client: a plan looks at no more than some hundred loads, and a load at no more than some
dozen steps. A refusal is one line of text: 400 names the parameter, 404 and 422 say what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from exporters.client_view import ClientView
from exporters.pages.routing import Request, Response, plain
from exporters.pages.snapshot_pages import JSON, nothing_yet
from exporters.what_if import (
    PLAN,
    PREDICT,
    SHOWN_CHARS,
    Parameter,
    QuestionError,
    as_json,
    plan_document,
    planned,
    predict_document,
    predicted,
    read_query,
    read_sizing,
    read_step_or_load,
)
from tracefit import Config, NotFoundError, TracefitError

_Answer = Callable[[Config, Mapping[str, Any]], dict[str, object]]


class AskPages:
    """Answers from the newest snapshot."""

    def __init__(self, view: ClientView) -> None:
        self._view = view

    def answer_predict(self, request: Request) -> Response:
        """Answer ``/predict``: what one step costs, or what requests see at a load."""
        return self._answer(request, PREDICT, _predict)

    def answer_plan(self, request: Request) -> Response:
        """Answer ``/plan``: how many requests fit the targets, and what limits them."""
        return self._answer(request, PLAN, _plan)

    def _answer(self, request: Request, parameters: tuple[Parameter, ...], answer: _Answer) -> Response:
        snapshot = self._view.snapshot()
        try:
            if request.repeated:
                raise QuestionError(request.repeated[:SHOWN_CHARS], "given twice")
            if request.empty:
                raise QuestionError(request.empty[:SHOWN_CHARS], "given without a value")
            given = read_query(request.query, parameters)
            if snapshot is None:
                return nothing_yet()
            tree = answer(self._view.config(snapshot, given.get("config", "")), given)
        except QuestionError as error:
            return plain(HTTPStatus.BAD_REQUEST, str(error))
        except NotFoundError as error:
            status = HTTPStatus.BAD_REQUEST if error.several else HTTPStatus.NOT_FOUND
            return plain(status, f"config: {error}")
        except TracefitError as error:
            return plain(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        return Response(HTTPStatus.OK, JSON, f"{as_json(tree)}\n".encode(), (("Cache-Control", "no-store"),))


def _predict(config: Config, given: Mapping[str, Any]) -> dict[str, object]:
    question = read_step_or_load(given)
    return predict_document(config, question, predicted(config, question))


def _plan(config: Config, given: Mapping[str, Any]) -> dict[str, object]:
    question = read_sizing(given)
    return plan_document(config, question, planned(config, question))
