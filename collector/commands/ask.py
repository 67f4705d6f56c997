"""From the arguments of a question to the answer's text: loads the snapshot, reads the numbers, calls the command."""

from __future__ import annotations

import argparse
from typing import Any

from collector.runtime import EXIT_USAGE, PrintLine
from exporters.what_if import Load, QuestionError, Sizing, Step, milliseconds, read_sizing, read_step_or_load
from tracefit import Snapshot

from .answers import load_snapshot, read_token, refusal
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
        return doctor(arguments.url, read_token(arguments.token_file), in_json=in_json, say=say)
    if arguments.question == "diff":
        return diff(_load(arguments, "before"), _load(arguments, "after"), in_json=in_json, say=say, note=note)
    if arguments.question == "show":
        return show(_load(arguments), which=arguments.config, in_json=in_json, say=say, note=note)
    try:
        question = _question(vars(arguments))
    except QuestionError as error:
        note(refusal(error))
        return EXIT_USAGE
    snapshot = _load(arguments)
    if isinstance(question, Sizing):
        return plan(snapshot, question, which=arguments.config, in_json=in_json, say=say, note=note)
    now = bool(arguments.now)
    return predict(snapshot, question, which=arguments.config, now=now, in_json=in_json, say=say, note=note)


def _question(options: dict[str, Any]) -> Step | Load | Sizing:
    if options["question"] == "predict":
        return read_step_or_load(options)
    return read_sizing({**options, **{name: _option_ms(name, options[name]) for name in ("itl", "ttft")}})


def _option_ms(name: str, text: str | None) -> float | None:
    try:
        return None if text is None else milliseconds(text)
    except ValueError as error:
        raise QuestionError(name, str(error)) from None


def _load(arguments: argparse.Namespace, name: str = "snapshot") -> Snapshot:
    return load_snapshot(getattr(arguments, name), arguments.token_file)
