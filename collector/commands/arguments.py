"""What the commands' arguments have in common: types of values, options that several commands take, wrong usages.

Nothing is abbreviated, and a word that is not known brings the one nearest to it. Nothing heavy is imported, since
every ``tracefit --help`` reads this.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from collector.config import ENV_FILE, PROFILES, Config, ConfigError, is_endpoint, is_page_url, load, suggestion
from collector.runtime import print_stderr, print_stdout
from exporters.questions import READERS, Parameter, as_json
from tracefit import BadInputError

from . import Report

Function = Callable[..., Any]
"""What is made a command."""

MEANT = {
    "serve": "run",
    "start": "run",
    "learn": "replay",
    "fit": "replay",
    "capacity": "plan",
    "status": "doctor",
    "help": "--help",
    "version": "--version",
    "evaluate": "lab evaluate",
    "donors": "lab donors",
    "merge": "lab merge",
    "compare": "diff",
    "check-config": "config check",
    "validate": "config check",
    "explain": "config explain",
}
"""What newcomers type, and what they mean by it."""
MEANT_OPTIONS = {
    **dict.fromkeys(("--tpot", "--slo"), "--itl"),
    "--qps": "--rate",
    "--interval": "--every",
    **dict.fromkeys(("--model", "--config"), "--which"),
    **dict.fromkeys(("--url", "--vllm", "--target", "--endpoint"), "--scrape"),
    **dict.fromkeys(("--batch", "--batch-size"), "--requests"),
    **dict.fromkeys(("--input", "--input-len", "--input-tokens", "--isl"), "--prompt"),
    **dict.fromkeys(("--output-len", "--output-tokens", "--osl"), "--output"),
    **dict.fromkeys(("--host", "--port"), "--listen"),
    "--metrics": "--pages",
    **dict.fromkeys(("--directory", "--output", "--out", "-o"), "--dir"),
    "--token": "--token-file",
}
"""The same of options, where the command has what they mean."""


def describe_usage_error(error: click.UsageError) -> str:
    """One sentence of what is wrong and what to type; the help where nothing was typed."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        return error.ctx.get_help()
    text = " ".join(error.format_message().split()).rstrip(".").replace("valid float range", "number")
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        text = f"{text.partition('. ')[0]}{_usage(error.ctx)}"
    if isinstance(error, click.NoSuchOption):
        text = f"there is no option {error.option_name!r}{_meant_option(error)}"
    if isinstance(error, click.NoSuchCommand):
        text = f"there is no command {error.command_name!r}{_meant_command(error)}"
    near = re.search(r"'(\S+)' is not one of (.+)", text) if isinstance(error, click.BadParameter) else None
    if near:
        text += suggestion(near[1], near[2].replace("'", "").split(", "))
    if url := re.search(r"Path '(https?://\S+)' does not exist", text):
        text += f"; a server is learned from by 'tracefit run --scrape {url[1]}'"
    if surplus := re.search(r"unexpected extra arguments? \((.+)\)", text):
        text += _meant_surplus(error, surplus[1])
    where = f"'{error.ctx.command_path} --help'" if error.ctx is not None else "--help"
    return f"usage error: {text[:1].lower()}{text[1:]} (see {where})"


def _meant_surplus(error: click.UsageError, words: str) -> str:
    """What to type in place of arguments that are too many."""
    if words in ("us", "ms", "s"):
        return "; a time is one word, like 30ms"
    for option, kind in (("--config", r"\S+\.ya?ml"), ("--scrape", r"https?://\S+")):
        if re.fullmatch(kind, words) and option in _options(error):
            return f"; did you mean '{option} {words}'?"
    return _usage(error.ctx) if error.ctx is not None else ""


def _usage(context: click.Context) -> str:
    """What to type where the parameters are too few or too many."""
    needed = [param for param in context.command.params if param.required]
    named = (f"{param.opts[0]} " if isinstance(param, click.Option) else "" for param in needed)
    words = (name + param.make_metavar(context) for name, param in zip(named, needed, strict=True))
    return f"; type '{' '.join([context.command_path, *words])}'"


def _meant_command(error: click.NoSuchCommand) -> str:
    """What to type in place of a command that the group does not have."""
    name, has = error.command_name, list(getattr(error.ctx and error.ctx.command, "commands", ()))
    meant = {word: meant for word, meant in MEANT.items() if word not in has}
    words = {*has, *meant, *meant.values()} - ({name} - {*meant})  # `lab run` is no command, `run` is
    return suggestion(name, sorted(words), meant=meant) or f"; there are {', '.join(has)}"


def _meant_option(error: click.NoSuchOption) -> str:
    """What to type in place of an option that the command does not have."""
    name, has = error.option_name, _options(error)
    meant = MEANT_OPTIONS.get(name)
    if meant in has:
        return f"; did you mean {meant!r}?"
    words = {*re.split("[-_]", name.removeprefix("--"))}
    keys = [key for key in Config.__struct_fields__ if words <= {*key.split("_")}] if "--config" in has else []
    if keys:
        return f", but in the configuration: set {' or '.join(f'TRACEFIT_{each.upper()}' for each in keys)}"
    if not meant and (near := suggestion(name, has, 0.7)):
        return near
    if isinstance(error.ctx and error.ctx.command, click.Group):
        return "; options stand after a command, like 'tracefit run --config FILE'"
    own = ", ".join(sorted(each for each in has if each.startswith("--")))
    return own and f"; there are {own}"


def _options(error: click.UsageError) -> set[str]:
    return {each for param in (error.ctx.command.params if error.ctx else ()) for each in param.opts}


def host_port(text: str) -> str:
    """Where somebody listens."""
    if not is_endpoint(text):
        raise ValueError(f"{text!r} is not host:port, the port 0 to 65535, like 127.0.0.1:4317")
    return text


def interval(text: str) -> float:
    """Seconds of 30s, 5m or 1h."""
    match = re.fullmatch(r"(\d{1,6})([smh])", text)
    seconds = float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise ValueError(f"{text!r} is no time like 30s, 5m or 1h")
    return seconds


def state_source(text: str) -> str:
    """Where ``fleet pull`` finds states."""
    if not is_page_url(text) and not os.path.exists(text):  # noqa: PTH110 -- a Path raises where a name is too long
        raise ValueError(
            f"{text!r} is no file or directory, and no address like http://HOST:9464 or dns+http://NAME:9464"
        )
    return text


class Command(click.Command):
    """A command that every wrong usage of it names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse them; where an option lacks its value, click forgets the command."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; an option whose value makes no sense is a wrong usage, whoever finds it."""
        try:
            return super().invoke(ctx)
        except BadInputError as error:
            raise click.UsageError(f"--{error.parameter.replace('_', '-')}: {error.problem}", ctx) from None
        except ConfigError as error:
            if not error.key.startswith("--"):
                raise
            raise click.UsageError(f"{error.key}: {error.problem}", ctx) from None


class Group(Command, click.Group):
    """The same of a group, and of all commands in it."""

    command_class = Command
    group_class = type


class Number(click.FloatRange):
    """A number within bounds, which no NaN is."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


FILE = click.Path(path_type=Path)
PRESENT = click.Path(exists=True, allow_dash=True, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
"""What is read; the same, looked for at once; what is written; where several files are written."""


def snapshot_argument(name: str) -> Callable[[Function], Function]:
    """A file or an address that has a snapshot."""
    return click.argument(name, type=click.Path(), metavar="FILE|HOST:PORT")


def config_options(command: Function) -> Function:
    """``--config`` and ``--profile``."""
    meaning = "Defaults for: sidecar, one pod; gateway, up to 500 engines; bulk, recordings."
    profile = click.option("--profile", type=click.Choice(PROFILES), help=meaning)
    file = click.option(
        "--config", type=FILE, envvar=ENV_FILE, metavar="FILE", help=f"YAML (default: the path in ${ENV_FILE})."
    )
    return file(profile(command))


def with_config(command: Function) -> Function:
    """``--config`` and ``--profile``, read: the command gets the configuration as ``config``."""

    @functools.wraps(command)
    def run(*args: Any, config: Path | None, profile: str | None, **options: Any) -> Any:
        return command(*args, config=load(config, os.environ, profile), **options)

    return config_options(run)


def json_option(command: Function) -> Function:
    """``--json``: one document on standard output, times in microseconds; what is for eyes goes to standard error."""
    return click.option("--json", "in_json", is_flag=True, help="Print the result as one JSON document.")(command)


def reports(command: Function) -> Function:
    """Prints the report that a command returns, ``--json`` as a document; ``-o`` writes the same to a file."""

    @functools.wraps(command)
    def run(*args: Any, out: Path | None, in_json: bool, **options: Any) -> int:
        return deliver(functools.partial(command, *args, **options), out, in_json=in_json)

    return out_option("Write it to this file", required=False)(json_option(run))


def deliver(make: Callable[[], Report], out: Path | None, *, in_json: bool) -> int:
    """Print a report, or write it to a file, which nothing that the command reads may be; the exit code."""
    from collector.recordings import check_targets  # noqa: PLC0415 -- not needed for --help
    from exporters.snapshot_file import write_atomically  # noqa: PLC0415

    file = None if out is None or str(out) == "-" else out
    if file is not None:
        check_targets(file, read=map(Path, _paths_read()))
    report = make()
    text = "\n".join(report.lines) if not in_json else "" if report.document is None else as_json(report.document)
    if text and file is not None:
        write_atomically(file, f"{text}\n".encode())
        text = f"written: {file}"
    if text:
        print_stdout(text)
    for note in report.notes:
        print_stderr(note)
    return report.code


def _paths_read() -> Iterator[str]:
    """What the command that runs was given as paths, but for the one to write to."""
    context = click.get_current_context()
    for param in context.command.params:
        given = context.params.get(param.name or "")
        if isinstance(param.type, click.Path) and given and param.name != "out":
            yield from map(str, given if isinstance(given, tuple) else (given,))


def out_option(meaning: str, *, required: bool = True, of: click.Path = NEW_FILE) -> Callable[[Function], Function]:
    """``-o``, ``--out``."""
    metavar = "DIR" if of is DIRECTORY else "OUT"
    return click.option("-o", "--out", required=required, type=of, metavar=metavar, help=f"{meaning}.")


def which_option(command: Function) -> Function:
    """Which configuration of a snapshot is meant; ``--config`` names a file, as of all commands that take it."""
    meaning = "Which configuration, where there are several: its id, or words of its name."
    return click.option("--which", default="", metavar="WORDS", help=meaning)(command)


def token_option(command: Function) -> Function:
    """What a sidecar may want to hear before it answers."""
    return click.option("--token-file", type=FILE, metavar="FILE", help="Bearer token for the address.")(command)


def asks_snapshot(command: Function) -> Function:
    """The options of every question to one snapshot, and the snapshot itself, loaded from a file or an address."""

    @functools.wraps(command)
    def run(*, snapshot: str, token_file: Path | None, **options: Any) -> Any:
        from .ask import load_snapshot  # noqa: PLC0415 -- numpy and the client are not needed for --help

        return command(snapshot=load_snapshot(snapshot, token_file), **options)

    return snapshot_argument("snapshot")(which_option(token_option(reports(run))))


def asks(parameters: Iterable[Parameter]) -> Callable[[Function], Function]:
    """An option for each parameter of a question; what a number may be, the question knows."""

    def add(command: Function) -> Function:
        for each in reversed(list(parameters)):
            settings: dict[str, Any] = {"is_flag": True}
            if each.kind != "switch":
                settings = {"type": READERS[each.kind], "metavar": "TIME" if each.kind == "time" else "N"}
            meaning = f"{each.meaning[:1].upper()}{each.meaning[1:]}."
            name = f"--{each.name.replace('_', '-')}"
            command = click.option(name, help=meaning, required=each.required, **settings)(command)
        return command

    return add


def many(name: str, metavar: str) -> Callable[[Function], Function]:
    """One file or more; a wrong one is said before an option that is missing."""
    return click.argument(name, nargs=-1, required=True, type=PRESENT, metavar=f"{metavar}...")
