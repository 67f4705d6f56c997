"""How the command line is parsed: nothing is abbreviated, and a word that is not known brings the one nearest to it.

Imports nothing heavy, since every ``tracefit --help`` reads it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from collector.config import is_endpoint, suggestion

EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 78 bad configuration, 130 stopped by Ctrl-C
environment: TRACEFIT_CONFIG names the configuration file, TRACEFIT_<SECTION>__<KEY> sets a key
every key:   tracefit check-config --explain KEY
"""

THROTTLE_MAX = 100.0
SPEED_MIN = 0.01
_DIGITS_MAX = 9
COMPLETED_SHELLS = ("bash", "zsh", "tcsh")
_MISSING = "the following arguments are required"


class CommandParser(argparse.ArgumentParser):
    """Every command's parser; an abbreviated option would break scripts when another one begins alike."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)
        self.register("type", Path, _path)  # Path("") is the working directory
        self._given: Sequence[str] = ()
        self._commands: argparse.Action | None = None

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse does; one of a few words brings the one nearest to a wrong one."""
        if "choices" in settings:
            settings.setdefault("type", _one_of(settings["choices"], settings.get("default")))
        return super().add_argument(*names, **settings)

    def add_subparsers(self, **settings: Any) -> Any:
        """As argparse does, and remembers them."""
        self._commands = super().add_subparsers(**settings)
        return self._commands

    def parse_known_args(  # type: ignore[override]  # a command knows its own usage; its parent's would mislead
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but what is left over ends the command here."""
        self._given = sys.argv[1:] if args is None else args
        if self._commands is not None and self._given and not self._given[0].startswith("-"):
            try:
                _one_of(list(self._commands.choices or ()))(self._given[0])
            except argparse.ArgumentTypeError as error:
                self.error(f"argument {self._commands.metavar}: {error}")
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._name_unknown(unknown[0]))
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Usage, one sentence, exit code 2."""
        if message.startswith(_MISSING):
            options = (word.partition("=")[0] for word in self._given if word.startswith("--") and word != "--")
            misspelled = next((option for option in options if option not in self._option_string_actions), None)
            message = message if misspelled is None else self._name_unknown(misspelled)
        super().error(message)

    def _name_unknown(self, argument: str) -> str:
        return f"unknown argument {argument!r}{suggestion(argument.partition('=')[0], self._option_string_actions)}"


def _one_of(known: Collection[str], default: object = None) -> Callable[[str], str]:
    """What takes one of these words; the default passes through it, too."""

    def word(text: str) -> str:
        if text not in known and text != default:
            listed = ", ".join(map(repr, known))
            raise argparse.ArgumentTypeError(
                f"invalid choice: {text!r} (choose from {listed}){suggestion(text, known)}"
            )
        return text

    return word


class PrintCompletion(argparse.Action):
    """``--print-completion SHELL``: a script for the shell, made from the parser itself."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> NoReturn:
        """Print it and end."""
        del namespace, option_string
        import shtab  # noqa: PLC0415 -- needed by this option only

        _complete_files(parser, shtab.FILE)
        if sys.stdout is not None:  # as it is with `>&-`
            sys.stdout.write(shtab.complete(parser, shell=str(values)) + "\n")
            sys.stdout.flush()
        parser.exit()


def add_completion_option(parser: argparse.ArgumentParser) -> None:
    """``--print-completion``."""
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=COMPLETED_SHELLS, help="a script for your shell, and end"
    )


def _complete_files(parser: argparse.ArgumentParser, files: object) -> None:
    """Say which arguments of a parser and of those below it are paths."""
    for action in parser._actions:  # noqa: SLF001 -- argparse has no public way to walk a parser
        if action.type is Path:
            action.complete = files  # type: ignore[attr-defined]  # where shtab looks for it
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                _complete_files(below, files)


def add_demo_parser(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """``tracefit demo``, which ``run`` runs."""
    demo = commands.add_parser("demo", help="watch a real sidecar learn from a recording, 20 times faster")
    demo.add_argument("--speed", type=demo_speed, default=20.0, metavar="N", help="how much faster than recorded (20)")
    demo.add_argument("--recording", type=Path, metavar="FILE", help="a recording other than the bundled one")
    demo.add_argument("--directory", type=Path, metavar="DIR", help="where its files go (snapshots/demo)")
    demo.add_argument(
        "--throttle",
        type=throttle_factor,
        default=1.0,
        metavar="N",
        help="from its middle on, the recorded machine takes N times as long (1)",
    )
    instead = demo.add_mutually_exclusive_group()
    instead.add_argument(
        "--to",
        type=host_port,
        metavar="HOST:PORT",
        help="send to a sidecar that runs already, in real time, for ever",
    )
    instead.add_argument("--save", type=Path, metavar="FILE", help="no sidecar: write what would be sent to FILE")
    demo.set_defaults(command=run)


def positive_number(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(text)


def demo_speed(text: str) -> float:
    """A number that brings the recording to an end within some days."""
    number = positive_number(text)
    if number < SPEED_MIN:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {SPEED_MIN:g} on")
    return number


def throttle_factor(text: str) -> float:
    """A number that leaves the stamps of a recording within their 64 bits."""
    number = positive_number(text)
    if not 1.0 / THROTTLE_MAX <= number <= THROTTLE_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {1.0 / THROTTLE_MAX:g} to {THROTTLE_MAX:g}")
    return number


def share_within_one(text: str) -> float:
    """A number between zero and one, both left out."""
    number = positive_number(text)
    if number >= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share between 0 and 1")
    return number


def share(text: str) -> float:
    """A number from zero to one."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 <= number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return number


def whole_number(text: str) -> int:
    """Zero or a number of things."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def host_port(text: str) -> str:
    """Where somebody listens."""
    if not is_endpoint(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, the port 0 to 65535")
    return text
