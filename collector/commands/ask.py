"""From the arguments of a question to the answer's text: loads the snapshot, reads the numbers, calls the command."""

from __future__ import annotations

import argparse
from typing import Any

import tracefit
from collector.runtime import EXIT_USAGE, PrintLine, StartError
from exporters.what_if import Load, QuestionError, Sizing, Step, milliseconds, read_sizing, read_step_or_load

from .answers import refusal
from .diff import diff
from .doctor import doctor
from .plan import plan
from .predict import predict
from .show import show


def ask(arguments: argparse.Namespace, say: PrintLine, note: PrintLine) -> int:
    """Answer ``predict``, ``plan``, ``show``, ``diff`` or ``doctor``.

    Raises:
        StartError: the snapshot or the token cannot be read.
    """
    in_json = arguments.json
    if arguments.question == "doctor":
        return doctor(arguments.url, _token(arguments), in_json=in_json, say=say)
    if arguments.question == "diff":
        return diff(_load(arguments, "before"), _load(arguments, "after"), in_json=in_json, say=say, note=note)
    if arguments.question == "show":
        return show(_load(arguments), config_id=arguments.config, in_json=in_json, say=say, note=note)
    try:
        question = _question(vars(arguments))
    except QuestionError as error:
        note(refusal(error))
        return EXIT_USAGE
    snapshot = _load(arguments)
    if isinstance(question, Sizing):
        return plan(snapshot, question, config_id=arguments.config, in_json=in_json, say=say, note=note)
    return predict(snapshot, question, config_id=arguments.config, in_json=in_json, say=say, note=note)


def _question(options: dict[str, Any]) -> Step | Load | Sizing:
    if options["question"] == "predict":
        return read_step_or_load(options)
    return read_sizing({**options, **{name: _option_ms(name, options[name]) for name in ("itl", "ttft")}})


def _option_ms(name: str, text: str | None) -> float | None:
    try:
        return None if text is None else milliseconds(text)
    except ValueError as error:
        raise QuestionError(name, str(error)) from None


def _token(arguments: argparse.Namespace) -> str | None:
    path = arguments.token_file
    try:
        return None if path is None else str(path.read_text(encoding="utf-8").partition("\n")[0].strip())
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartError(f"cannot read {path}: it is not UTF-8 text") from None


def _load(arguments: argparse.Namespace, name: str = "snapshot") -> tracefit.Snapshot:
    try:
        return tracefit.load(getattr(arguments, name), token=_token(arguments))
    except tracefit.LoadError as error:
        raise StartError(str(error)) from None
