"""From the arguments of a question to the answer's text: loads the snapshot, reads the numbers, calls the command."""

from __future__ import annotations

import argparse

import tracefit
from collector.runtime import EXIT_USAGE, PrintLine, StartError

from .answers import milliseconds
from .diff import diff
from .plan import Assumed, Targets, plan
from .predict import Load, Step, predict
from .show import show


def ask(arguments: argparse.Namespace, say: PrintLine, note: PrintLine) -> int:
    """Answer ``predict``, ``plan``, ``show`` or ``diff``.

    Raises:
        StartError: the snapshot or the token cannot be read.
    """
    in_json = arguments.json
    if arguments.question == "diff":
        return diff(_load(arguments, "before"), _load(arguments, "after"), in_json=in_json, say=say, note=note)
    if arguments.question == "show":
        return show(_load(arguments), config_id=arguments.config, in_json=in_json, say=say, note=note)
    try:
        question = _step_or_load(arguments) if arguments.question == "predict" else _targets(arguments)
    except ValueError as error:
        note(f"error: {error}")
        return EXIT_USAGE
    snapshot = _load(arguments)
    if isinstance(question, Targets):
        assumed = Assumed(arguments.max_num_seqs, arguments.max_num_batched_tokens, arguments.kv_tokens)
        return plan(snapshot, question, assumed, config_id=arguments.config, in_json=in_json, say=say, note=note)
    return predict(snapshot, question, config_id=arguments.config, in_json=in_json, say=say, note=note)


def _step_or_load(arguments: argparse.Namespace) -> Step | Load:
    of_step = [arguments.prefill, arguments.requests, arguments.context]
    of_load = [arguments.prompt, arguments.output, arguments.concurrency]
    stated = [any(value is not None for value in values) for values in (of_step, of_load)]
    if stated == [True, False]:
        if arguments.requests is None:
            raise ValueError("a step needs --requests")
        return Step(arguments.prefill or 0.0, arguments.requests, arguments.context or 0.0)
    if stated == [False, True]:
        if arguments.prompt is None or arguments.output is None:
            raise ValueError("a load needs --prompt and --output")
        concurrency = 1.0 if arguments.concurrency is None else arguments.concurrency
        return Load(arguments.prompt, arguments.output, concurrency, arguments.prefix_hit)
    raise ValueError("give a step (--requests, --prefill, --context) or a load (--prompt, --output, --concurrency)")


def _targets(arguments: argparse.Namespace) -> Targets:
    return Targets(
        prompt_tokens=arguments.prompt,
        output_tokens=arguments.output,
        itl_ms=_option_ms("--itl", arguments.itl),
        ttft_ms=_option_ms("--ttft", arguments.ttft),
        rate=arguments.rate,
        prefix_hit=arguments.prefix_hit,
        safe=arguments.safe,
    )


def _option_ms(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else milliseconds(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _load(arguments: argparse.Namespace, name: str = "snapshot") -> tracefit.Snapshot:
    token = None
    if arguments.token_file is not None:
        try:
            token = arguments.token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except OSError as error:
            raise StartError(f"cannot read {arguments.token_file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise StartError(f"cannot read {arguments.token_file}: it is not UTF-8 text") from None
    try:
        return tracefit.load(getattr(arguments, name), token=token)
    except tracefit.LoadError as error:
        raise StartError(str(error)) from None
