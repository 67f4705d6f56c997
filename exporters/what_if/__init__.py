"""Questions to the coefficients and their answers: read from text, answered by the client library, written as JSON."""

from __future__ import annotations

from exporters.what_if.answer_documents import LIMIT_WORDS, as_json, plan_document, planned, predict_document, predicted
from exporters.what_if.asked import (
    PLAN,
    PREDICT,
    SHOWN_CHARS,
    Assumed,
    Load,
    Parameter,
    QuestionError,
    Sizing,
    Step,
    Targets,
    milliseconds,
    read_query,
    read_sizing,
    read_step_or_load,
)
from exporters.what_if.mix import Mix, MixOf

__all__ = [
    "LIMIT_WORDS",
    "PLAN",
    "PREDICT",
    "SHOWN_CHARS",
    "Assumed",
    "Load",
    "Mix",
    "MixOf",
    "Parameter",
    "QuestionError",
    "Sizing",
    "Step",
    "Targets",
    "as_json",
    "milliseconds",
    "plan_document",
    "planned",
    "predict_document",
    "predicted",
    "read_query",
    "read_sizing",
    "read_step_or_load",
]
