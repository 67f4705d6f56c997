"""The arguments of the commands that ask a snapshot or a sidecar, in a file or at an address.

Imports nothing heavy, since every ``tracefit --help`` reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .arguments import CommandParser

EXPORT_FORMATS = ("blis-yaml", "blis-flags", "blis-trace")
QuestionHandler = Callable[[argparse.Namespace], int]


def add_question_parsers(commands: argparse._SubParsersAction[CommandParser], answer: QuestionHandler) -> None:
    """Add the commands; ``question`` names the one that was given."""
    predict = commands.add_parser("predict", help="what one step costs, or what requests see at a load")
    _add_source(predict, "snapshot")
    _add_number(predict, "--prefill", "prefill tokens of the step")
    _add_number(predict, "--requests", "requests in the step")
    _add_number(predict, "--context", "tokens of decode context of the step")
    _add_request(predict, required=False)
    _add_number(predict, "--concurrency", "requests in flight")
    predict.add_argument("--now", action="store_true", help="of the next seconds: times the level of the last steps")
    plan = commands.add_parser("plan", help="how many requests fit the targets, and what limits them")
    _add_source(plan, "snapshot")
    _add_request(plan, required=True)
    plan.add_argument("--itl", metavar="TIME", help="largest mean time between tokens, like 30ms")
    plan.add_argument("--ttft", metavar="TIME", help="largest mean time to first token, like 1s")
    _add_number(plan, "--rate", "requests per second that arrive: how many engines do they need")
    plan.add_argument("--safe", action="store_true", help="hold the upper edge of the interval against the targets")
    _add_limits(plan)
    show = commands.add_parser("show", help="a snapshot for eyes")
    _add_source(show, "snapshot")
    diff = commands.add_parser("diff", help="which coefficients moved between two snapshots, and what that does")
    _add_source(diff, "before", "after")
    doctor = commands.add_parser("doctor", help="is telemetry coming, what waits for what, and what to change")
    doctor.add_argument("url", metavar="URL", help="address of a sidecar, or of an inference server")
    _add_access(doctor)
    for command in (predict, plan, show):
        add_choice_option(command)
    for name, command in (
        ("predict", predict),
        ("plan", plan),
        ("show", show),
        ("diff", diff),
        ("doctor", doctor),
    ):
        command.set_defaults(command=answer, question=name)


def add_choice_option(command: argparse.ArgumentParser) -> None:
    """Which configuration of a snapshot is meant; ``--config`` names a file, as of all commands that take it."""
    command.add_argument(
        "--which",
        dest="config",
        default="",
        metavar="WORDS",
        help="config_id, its beginning, or words of its name; needed if there are more",
    )


def add_token_option(command: argparse.ArgumentParser) -> None:
    """What a sidecar may want to hear before it answers."""
    command.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token for the address")


def _add_source(command: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        command.add_argument(name, metavar="SNAPSHOT", help="snapshot.json, or the address of a sidecar")
    _add_access(command)


def _add_access(command: argparse.ArgumentParser) -> None:
    add_token_option(command)
    command.add_argument("--json", action="store_true", help="print one JSON document, times in microseconds")


def _add_request(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("--prompt", type=float, required=required, metavar="N", help="prompt tokens of a request")
    command.add_argument("--output", type=float, required=required, metavar="N", help="output tokens of a request")
    command.add_argument("--prefix-hit", type=float, metavar="RATIO", help="share of prompts cached (0)")


def _add_number(command: argparse.ArgumentParser, option: str, meaning: str) -> None:
    command.add_argument(option, type=float, metavar="N", help=meaning)


def _add_limits(command: argparse.ArgumentParser) -> None:
    for option in ("--max-num-seqs", "--max-num-batched-tokens", "--kv-tokens"):
        command.add_argument(
            option, type=int, metavar="N", help="a limit of the engine that its telemetry did not tell"
        )
