"""What the commands' arguments have in common: types of values, options that several commands take, wrong usages.

Nothing is abbreviated, and a word that is not known brings the one nearest to it. Nothing heavy is imported, since
every ``tracefit --help`` reads this.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from collector.config import ENV_FILE, PROFILES, is_endpoint, suggestion

Function = Callable[..., Any]
"""What is made a command."""

MOVED = {
    "evaluate": "lab evaluate",
    "donors": "lab donors",
    "merge": "lab merge",
    "check-config": "config check",
}
"""Commands of earlier versions, and what to type instead; they go with the next release."""
MOVED_OPTIONS = {
    "--check": "tracefit config check",
    "--explain": "tracefit config explain KEY",
    "--schema": "tracefit config schema",
    "--print-completion": "_TRACEFIT_COMPLETE=bash_source tracefit",
}
MEANT = {
    "serve": "run",
    "start": "run",
    "learn": "replay",
    "fit": "replay",
    "capacity": "plan",
    "status": "doctor",
    "help": "--help",
}
"""What newcomers type, and what they mean by it."""


class Commands(click.Group):
    """A group of commands that names the nearest one to a word that is none."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with our sentence for what is no command."""
        word = args[0]
        if self.get_command(ctx, word) is None and not word.startswith("-"):
            if word in MOVED and ctx.parent is None:
                ctx.fail(f"'tracefit {word}' is now 'tracefit {MOVED[word]}'")
            near = (
                f"; did you mean {MEANT[word]!r}?"
                if word in MEANT
                else suggestion(word, [*self.commands, *(() if ctx.parent else MOVED.values())])
            )
            ctx.fail(f"there is no command {word!r}{near}")
        return super().resolve_command(ctx, args)


def say_usage(error: click.UsageError) -> str:
    """One sentence of what is wrong and what to type; the help where nothing was typed."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        return error.ctx.get_help()
    text = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        moved = MOVED_OPTIONS.get(error.option_name)
        near = f"; did you mean {error.possibilities[0]!r}?" if error.possibilities else ""
        text = f"there is no option {error.option_name!r}" + (f"; type '{moved}'" if moved else near)
    where = error.ctx.command_path if error.ctx is not None else "tracefit"
    return f"usage error: {text[:1].lower()}{text[1:]} (see '{where} --help')"


class Word(click.Choice[str]):
    """One of a few words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word, or the sentence that names the nearest one."""
        if value not in self.choices:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}{suggestion(value, self.choices)}", param, ctx)
        return str(value)


class Place(click.Path):
    """A path as ``Path``; ``Path("")`` would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path as it was given."""
        if not str(value):
            self.fail("'' is no path", param, ctx)
        return Path(value)


class Number(click.ParamType[float]):
    """A finite number within bounds, both included, which ``range_text`` describes."""

    name = "number"

    def __init__(self, range_text: str, low: float = -math.inf, high: float = math.inf) -> None:
        self._range_text, self._low, self._high = range_text, low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and self._low <= number <= self._high):
            self.fail(f"{value!r} is no number {self._range_text}", param, ctx)
        return number


class HostPort(click.ParamType[str]):
    """Where somebody listens."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as it was given."""
        if not is_endpoint(value):
            self.fail(f"{value!r} is not host:port, the port 0 to 65535", param, ctx)
        return str(value)


class Interval(click.ParamType[float]):
    """Seconds of 30s, 5m or 1h."""

    name = "time"
    _seconds = {"s": 1.0, "m": 60.0, "h": 3600.0}  # noqa: RUF012 -- a constant

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The seconds."""
        match = re.fullmatch(r"(\d{1,6})([smh])", str(value))
        seconds = float(match[1]) * self._seconds[match[2]] if match else 0.0
        if seconds <= 0.0:
            self.fail(f"{value!r} is no time like 30s, 5m or 1h", param, ctx)
        return seconds


FILE = Place()
RATIO = Number("from 0 to 1", 0.0, 1.0)


def named_file() -> Path | None:
    """The configuration file that the environment names."""
    named = os.environ.get(ENV_FILE)
    return Path(named) if named else None


def config_options(command: Function) -> Function:
    """``--config`` and ``--profile``."""
    profile = click.option("--profile", type=Word(list(PROFILES)), help="Start from a configuration that comes along.")
    file = click.option(
        "--config", type=FILE, default=named_file, metavar="FILE", help=f"YAML (default: the path in ${ENV_FILE})."
    )
    return file(profile(command))


def json_option(command: Function) -> Function:
    """``--json``: one document on standard output, times in microseconds; what is for eyes goes to standard error."""
    return click.option("--json", "in_json", is_flag=True, help="Print the result as one JSON document.")(command)


def out_option(meaning: str, *, required: bool = True, metavar: str = "OUT") -> Callable[[Function], Function]:
    """``-o``, ``--out``."""
    return click.option("-o", "--out", required=required, type=FILE, metavar=metavar, help=meaning.capitalize() + ".")


def which_option(command: Function) -> Function:
    """Which configuration of a snapshot is meant; ``--config`` names a file, as of all commands that take it."""
    meaning = "The config_id, its beginning, or words of its name; needed if there are more."
    return click.option("--which", default="", metavar="WORDS", help=meaning)(command)


def token_option(command: Function) -> Function:
    """What a sidecar may want to hear before it answers."""
    return click.option("--token-file", type=FILE, metavar="FILE", help="Bearer token for the address.")(command)


def number_option(name: str, meaning: str, *, required: bool = False) -> Callable[[Function], Function]:
    """A number of a question; what it may be, the question knows."""
    return click.option(name, type=float, metavar="N", help=meaning, required=required)


def is_flag(name: str, meaning: str) -> Callable[[Function], Function]:
    """A switch."""
    return click.option(name, is_flag=True, help=meaning)


def request_options(*, required: bool) -> Callable[[Function], Function]:
    """What a request is like."""

    def add(command: Function) -> Function:
        hit = click.option("--prefix-hit", type=float, metavar="RATIO", help="Share of prompts cached (0).")
        output = number_option("--output", "Output tokens of a request.", required=required)
        prompt = number_option("--prompt", "Prompt tokens of a request.", required=required)
        return prompt(output(hit(command)))

    return add


def many(name: str, metavar: str) -> Callable[[Function], Function]:
    """One file or more."""
    return click.argument(name, nargs=-1, required=True, type=FILE, metavar=f"{metavar}...")
