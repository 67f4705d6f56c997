"""The arguments of the commands, and how the command line is parsed.

Nothing is abbreviated, and a word that is not known brings the one nearest to it. Nothing heavy is imported, since
every ``tracefit --help`` reads this.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from collector.config import is_endpoint, profile_names, suggestion

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


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    """``tracefit run``."""
    run.add_argument(
        "--scrape", action="append", default=[], metavar="URL", help="learn from a server's own page of metrics"
    )


def add_check_arguments(check: argparse.ArgumentParser) -> None:
    """``tracefit check-config``."""
    check.add_argument("--schema", action="store_true", help="print the JSON Schema of the configuration instead")
    check.add_argument("--explain", metavar="KEY", help="say what a key or a section means instead")


def add_export_arguments(export: argparse.ArgumentParser) -> None:
    """``tracefit export``."""
    export.add_argument(
        "snapshot", metavar="SNAPSHOT", help="snapshot.json, or the address of a sidecar; for blis-trace, a recording"
    )
    add_token_option(export)
    export.add_argument("--format", required=True, choices=EXPORT_FORMATS, help="see docs/blis.md")
    add_choice_option(export)
    export.add_argument("--model-config", type=Path, metavar="FILE", help="the model's config.json")
    export.add_argument("--hardware", metavar="NAME", help="GPU, or its memory bandwidth in TB/s")
    export.add_argument("--alpha", choices=["server", "effective"], default="server", help="see docs/blis.md (server)")
    export.add_argument("--mean", action="store_true", help="blis: step times with what stalls add in the mean")
    export.add_argument("--require", choices=["identified"], help="refuse if a coefficient is anything less")
    export.add_argument("--out", type=Path, metavar="DIR", help="where the files of blis-trace go")


def add_replay_arguments(replay: argparse.ArgumentParser) -> None:
    """``tracefit replay``."""
    replay.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="recordings, directories of them, or - (docs/recordings.md)"
    )
    replay.add_argument("--snapshot", required=True, type=Path, metavar="OUT", help="where the coefficients go")
    replay.add_argument("--state", type=Path, metavar="OUT", help="save what was learned, for donors and merges")


def add_evaluate_arguments(evaluate: argparse.ArgumentParser) -> None:
    """``tracefit evaluate``."""
    evaluate.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recordings, or directories of them")
    evaluate.add_argument("--json", type=Path, metavar="OUT", help="write every number as JSON")
    evaluate.add_argument("--snapshot", type=Path, metavar="FILE", help="score this snapshot's coefficients as well")
    evaluate.add_argument(
        "--learn-until",
        type=share_within_one,
        default=0.6,
        metavar="SHARE",
        help="part of each to learn from (0.6)",
    )
    evaluate.add_argument("--systems", default="", metavar="NAMES", help="comma-separated; default: all nine")
    evaluate.add_argument(
        "--leave-out",
        default="",
        choices=["config", "gpu", "model", "quantization", "workload"],
        help="what donors lack",
    )


def add_json_options(
    tellers: Iterable[argparse.ArgumentParser], writers: Iterable[argparse.ArgumentParser] = ()
) -> None:
    """``--json`` for commands whose result is told, and for those whose result is a snapshot that they write."""
    for command in tellers:
        command.add_argument("--json", action="store_true", help="print the result as one JSON document")
    for command in writers:
        command.add_argument("--json", action="store_true", help="print the snapshot that is written as well")


def add_donors_arguments(donors: argparse.ArgumentParser) -> None:
    """``tracefit donors``."""
    donors.add_argument("paths", nargs="+", type=Path, metavar="DIR", help="state files, or directories of them")


def add_merge_arguments(merge: argparse.ArgumentParser) -> None:
    """``tracefit merge``."""
    merge.add_argument("states", nargs="+", type=Path, metavar="STATE", help="state files of sidecars or replays")
    merge.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="the merged state")
    merge.add_argument("--snapshot", type=Path, metavar="OUT", help="its coefficients as well, and who differs")


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_INTERVAL = re.compile(r"(\d{1,6})([smh])")

FleetHandler = Callable[[argparse.Namespace], int]


def add_fleet_parser(commands: argparse._SubParsersAction[Any], pull: FleetHandler, replay: FleetHandler) -> None:
    """Add the command and what it does."""
    fleet = commands.add_parser("fleet", help="what many sidecars learned, as one: docs/fleet.md")
    actions = fleet.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("pull", help="gather states, merge them by configuration, name who differs")
    action.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="http://HOST:PORT, dns+http://NAME:PORT, @TARGETS.yaml, a directory, a state file, s3://BUCKET/PREFIX",
    )
    action.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="where the fleet's files go")
    action.add_argument(
        "--every", type=parse_interval, metavar="TIME", help="again and again, like 5m, with pages at exporters.http"
    )
    action.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token for the sidecars")
    action.add_argument(
        "--timeout", type=positive_number, default=10.0, metavar="S", help="longest wait for one state (10)"
    )
    action.add_argument(
        "--require", type=share, default=0.5, metavar="SHARE", help="write nothing if fewer sources gave a state (0.5)"
    )
    action.add_argument("--config", type=Path, metavar="FILE", help="YAML: models to keep, pages (default: as for run)")
    action.add_argument("--json", action="store_true", help="print the snapshot that is written as well")
    action.set_defaults(command=pull)
    _add_replay(actions, replay)


def _add_replay(actions: argparse._SubParsersAction[Any], replay: FleetHandler) -> None:
    action = actions.add_parser("replay", help="learn recordings of many engines in bulk, on Ray")
    action.add_argument(
        "places", nargs="+", metavar="PATH|URL", help="recordings, directories of them, s3://BUCKET/PREFIX"
    )
    action.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="where the fleet's files go")
    action.add_argument(
        "--ray",
        default="local",
        metavar="ADDRESS",
        help="a Ray cluster: HOST:PORT or auto (default: one for the while, here)",
    )
    action.add_argument("--rows", default="", metavar="DIR|URL", help="write every row as Parquet: docs/fleet.md")
    action.add_argument("--config", type=Path, metavar="FILE", help="YAML: models, joins (default: as for run)")
    action.add_argument("--profile", choices=profile_names(), help="start from a configuration that comes along")
    action.add_argument("--json", action="store_true", help="print the snapshot that is written as well")
    action.set_defaults(command=replay)


def parse_interval(text: str) -> float:
    """Seconds of 30s, 5m or 1h."""
    match = _INTERVAL.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 30s, 5m or 1h")
    return seconds


EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage, 78 bad configuration, 130 stopped by Ctrl-C
environment: TRACEFIT_CONFIG names the configuration file, TRACEFIT_<SECTION>__<KEY> sets a key
every key:   tracefit check-config --explain KEY
"""

THROTTLE_MAX = 100.0
SPEED_MIN = 0.01
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


def host_port(text: str) -> str:
    """Where somebody listens."""
    if not is_endpoint(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port, the port 0 to 65535")
    return text
