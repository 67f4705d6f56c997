"""What the commands' arguments have in common: types of values, options that several commands take, wrong usages.

Nothing is abbreviated, and a word that is not known brings the one nearest to it. Nothing heavy is imported, since
every ``tracefit --help`` reads this.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from collector.config import ENV_FILE, PROFILES, Config, is_endpoint, load, suggestion
from collector.runtime import StartError
from exporters.questions import READERS, Parameter

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
}
"""What newcomers type, and what they mean by it."""
MEANT_OPTIONS = {
    "--tpot": "--itl",
    "--slo": "--itl",
    "--qps": "--rate",
    "-v": "--version",
    "--model": "--which",
    "--url": "--scrape",
    "--vllm": "--scrape",
    "--target": "--scrape",
    "--endpoint": "--scrape",
    "--batch": "--requests",
    "--batch-size": "--requests",
    **dict.fromkeys(("--input", "--input-len", "--input-tokens", "--isl"), "--prompt"),
    **dict.fromkeys(("--output-len", "--output-tokens", "--osl"), "--output"),
    "--host": "--listen",
    "--metrics": "--pages",
    "--output": "--out",
    "--token": "--token-file",
    "--config": "--which",
    "--format": "--json",
    "--hardware": "--which",
}
"""The same of options, where the command has what they mean."""
ANSWERED = {
    **dict.fromkeys(("--port", "--grpc-port"), "--listen HOST:PORT takes telemetry, --pages HOST:PORT shows pages"),
    "--e2e": "targets are --itl and --ttft; E2E follows from both",
    "--concurrency": "it is what a plan finds; what requests see at a load, tracefit predict says",
    **dict.fromkeys(
        ("--tpot", "--itl", "--ttft"), "predict says it; targets are for tracefit plan SNAPSHOT --itl 30ms"
    ),
}
"""The same where one word does not answer."""


class Option(click.Option):
    """An option that stands under a heading of its own in the help."""

    def __init__(self, *args: Any, heading: str = "Options", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading


class Command(click.Command):
    """A command whose help has its options under their headings, and whose wrong usages name that help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, which forgets whose option it was that lacks its value."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click does, a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "heading", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class Commands(click.Group):
    """A group of such commands."""

    command_class = Command


def say_usage(error: click.UsageError) -> str:
    """One sentence of what is wrong and what to type; the help where nothing was typed."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and error.ctx is not None:
        return error.ctx.get_help()
    text = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        text = f"there is no option {error.option_name!r}{_meant_option(error)}"
    if isinstance(error, click.NoSuchCommand):
        text = f"there is no command {error.command_name!r}{_meant_command(error)}"
    for option, kind in (("--config", r"\S+\.ya?ml"), ("--scrape", r"https?://\S+")):
        surplus = re.search(rf"unexpected extra argument \(({kind})\)", text)
        if surplus and option in _options(error):
            text += f"; did you mean '{option} {surplus[1]}'?"
    where = error.ctx.command_path if error.ctx is not None else "tracefit"
    return f"usage error: {text[:1].lower()}{text[1:]} (see '{where} --help')"


def _meant_command(error: click.NoSuchCommand) -> str:
    """What to type in place of a command that the group does not have."""
    name, has = error.command_name, list(getattr(error.ctx and error.ctx.command, "commands", ()))
    near = f"; did you mean {MEANT[name]!r}?" if name in MEANT else suggestion(name, [*has, *MEANT.values()])
    return near or f"; there are {', '.join(has)}"


def _meant_option(error: click.NoSuchOption) -> str:
    """What to type in place of an option that the command does not have."""
    name, has = error.option_name, _options(error)
    if MEANT_OPTIONS.get(name) in has:
        return f"; did you mean {MEANT_OPTIONS[name]!r}?"
    key = "log_level" if name == "--verbose" else name.removeprefix("--").replace("-", "_")
    keys = [each for each in Config.__struct_fields__ if f"{each}_".startswith(f"{key}_") and "--config" in has]
    if key in keys or len(keys) == 1:
        return f", but a key of the configuration: set TRACEFIT_{(key if key in keys else keys[0]).upper()}"
    if name in ANSWERED and (not name.endswith("port") or "--listen" in has):
        return f": {ANSWERED[name]}"
    return f"; did you mean {error.possibilities[0]!r}?" if error.possibilities else ""


def _options(error: click.UsageError) -> set[str]:
    return {each for param in (error.ctx.command.params if error.ctx else ()) for each in param.opts}


class Word(click.Choice[str]):
    """One of a few words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word, or the sentence that names the nearest one."""
        if value not in self.choices:
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}{suggestion(value, self.choices)}", param, ctx)
        return str(value)


class Place(click.types.FuncParamType[str, Path]):
    """A path, which the shell completes."""

    shell_complete = click.Path().shell_complete


def number(range_text: str, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Reads a finite number within bounds, both included, which ``range_text`` describes."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{text!r} is no number {range_text}")
        return value

    return read


def host_port(text: str) -> str:
    """Where somebody listens."""
    if not is_endpoint(text):
        near = f"127.0.0.1:{text.removeprefix(':')}"
        meant = f"; did you mean {near!r}?" if is_endpoint(near) else ""
        raise ValueError(f"{text!r} is not host:port, the port 0 to 65535{meant}")
    return text


def _path(text: str) -> Path:
    if not text:  # Path("") would be the working directory
        raise ValueError("'' is no path")
    if "://" in text:
        raise ValueError(f"{text!r} is no file: tracefit run --scrape reads pages, tracefit fleet replay reads stores")
    return Path(text)


def _present(text: str) -> Path:
    """A file or a directory that is there; ``-`` is standard input."""
    path = _path(text)
    if text != "-" and not path.exists():
        raise StartError(f"cannot read {path}: No such file or directory")
    return path


def _new_file(text: str) -> Path:
    """Refused before the work, and not after an hour of it."""
    path = _path(text)
    parent = path.absolute().parent
    why = "it is a directory" if path.is_dir() else "" if os.access(parent, os.W_OK) else "no permission"
    if not parent.is_dir():
        why = "there is no such directory"
    if why:
        raise StartError(f"cannot write {path}: {why}")
    return path


def _directory(text: str) -> Path:
    path = _path(text)
    if path.exists() and not path.is_dir():
        raise StartError(f"cannot write to {path}: it is a file, and a directory is wanted")
    return path


def interval(text: str) -> float:
    """Seconds of 30s, 5m or 1h."""
    match = re.fullmatch(r"(\d{1,6})([smh])", text)
    seconds = float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise ValueError(f"{text!r} is no time like 30s, 5m or 1h")
    return seconds


FILE, PRESENT, NEW_FILE, DIRECTORY = map(Place, (_path, _present, _new_file, _directory))
"""What is read; the same, looked for at once; what is written; where several files are written."""


def config_options(command: Function) -> Function:
    """``--config`` and ``--profile``."""
    meaning = "Defaults for: sidecar, one pod; gateway, up to 500 engines; bulk, recordings."
    profile = click.option("--profile", type=Word(PROFILES), help=meaning)
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


def out_option(meaning: str, *, required: bool = True, of: Place = NEW_FILE) -> Callable[[Function], Function]:
    """``-o``, ``--out``."""
    metavar = "OUT" if of is NEW_FILE else "DIR"
    return click.option("-o", "--out", required=required, type=of, metavar=metavar, help=meaning.capitalize() + ".")


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

    return click.argument("snapshot")(which_option(token_option(json_option(run))))


def asks(heading: str, parameters: Iterable[Parameter]) -> Callable[[Function], Function]:
    """An option for each parameter of a question, under a heading; what a number may be, the question knows."""

    def add(command: Function) -> Function:
        for each in reversed(list(parameters)):
            settings: dict[str, Any] = {"cls": Option, "heading": heading, "required": each.required}
            if each.kind == "switch":
                settings["is_flag"] = True
            else:
                settings |= {"type": READERS[each.kind], "metavar": "TIME" if each.kind == "time" else "N"}
            meaning = f"{each.meaning[:1].upper()}{each.meaning[1:]}."
            command = click.option(f"--{each.name.replace('_', '-')}", help=meaning, **settings)(command)
        return command

    return add


def many(name: str, metavar: str, of_snapshot: str = "") -> Callable[[Function], Function]:
    """One file or more; a wrong one is said before an option that is missing.

    ``of_snapshot``: where recordings are read, what one does with a snapshot.
    """

    def refuse_snapshots(context: click.Context, _: click.Parameter, files: tuple[Path, ...]) -> tuple[Path, ...]:
        import tracefit  # noqa: PLC0415

        for path in files if of_snapshot else ():
            if path.suffix == ".json":
                with contextlib.suppress(tracefit.LoadError):
                    tracefit.load(path)
                    remedy = of_snapshot.format(path)
                    raise click.UsageError(f"{path} is a snapshot and no recording; {remedy}", context)
        return files

    return click.argument(
        name, nargs=-1, required=True, type=PRESENT, metavar=f"{metavar}...", callback=refuse_snapshots
    )
