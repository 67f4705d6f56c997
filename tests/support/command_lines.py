"""The command line as click has it: what a line of words asks for, and every command there is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import click

from collector.cli import tracefit


def parsed(words: Sequence[str]) -> SimpleNamespace:
    """The values of a command's parameters, as its line has them; a UsageError where it cannot be read."""
    command, left = tracefit, list(words)
    while isinstance(command, click.Group):
        name, command, left = command.resolve_command(click.Context(command, info_name="tracefit"), left)
    return SimpleNamespace(**command.make_context(name, left).params)


def every_command(group: click.Group = tracefit, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Name, with the groups that it is in, and command."""
    for name, command in group.commands.items():
        path = f"{above} {name}".strip()
        if isinstance(command, click.Group):
            yield from every_command(command, path)
        else:
            yield path, command


def options_of(command: click.Command) -> list[click.Option]:
    """Its options."""
    return [each for each in command.params if isinstance(each, click.Option)]


def spoken(command: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str], list[str]]:
    """What a command returned, and the lines that it said and noted."""
    said, noted = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(noted):
        returned = command(*args, **options)
    return returned, said.getvalue().splitlines(), noted.getvalue().splitlines()
