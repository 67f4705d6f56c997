"""``tracefit``: argv in, exit code out (0 done, 1 failed, 2 usage, 78 bad configuration, 130 Ctrl-C).

Every command is declared here, so that its help and what the shell completes are made of one thing. What a command
does is imported when it runs: ``--help`` should not cost a second, and the environment below has to be set before
numpy and grpc are imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from collector import __version__
from collector.commands import Report
from collector.commands.arguments import (
    DIRECTORY,
    FILE,
    NEW_FILE,
    Group,
    Number,
    asks,
    asks_snapshot,
    config_options,
    deliver,
    describe_usage_error,
    host_port,
    interval,
    json_option,
    many,
    out_option,
    reports,
    snapshot_argument,
    state_source,
    token_option,
    which_option,
    with_config,
)
from collector.config import (
    ENV_PREFIX,
    Config,
    ConfigError,
    as_yaml,
    check_keys,
    explain_key,
    json_schema,
    load_or_degrade,
    read_keys,
    scraping,
)
from collector.config import to_tree as config_tree
from collector.runtime import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    Clock,
    StartError,
    configure_logs,
    print_stderr,
    print_stdout,
    set_log_level,
)
from exporters import questions

if TYPE_CHECKING:
    from tracefit import Snapshot

_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # small solves only; more threads cost memory and reproducibility
    "GRPC_VERBOSITY": "NONE",  # the core prints its own view of a failed bind beside our sentence
}

_SECRET = re.compile(r"[^\s'\"]*:[^\s'\"]*(?=@)|(?<=[\w/]\?)[^\s'\"]*=[^\s'\"]*")
"""What stands before the host of an address, or is its query: no sentence repeats what may be a password or a token."""

RUN_EPILOG = """\b
Every key of the configuration is a variable, too:
  TRACEFIT_MODEL=llama TRACEFIT_ITL_MS=30 tracefit run --scrape http://localhost:8000/metrics
  tracefit config explain: all of them
"""
EPILOG = """\b
exit codes: 0 done, 1 failed, 2 wrong usage, 78 bad configuration, 130 stopped by Ctrl-C
environment: TRACEFIT_CONFIG names the configuration file, TRACEFIT_<KEY> sets a key
every key: tracefit config explain KEY
completion: eval "$(_TRACEFIT_COMPLETE=bash_source tracefit)", or zsh_source, fish_source
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, translate errors; never a traceback for what the user can mend."""
    try:
        code: int = tracefit.main(argv, "tracefit", standalone_mode=False)
    except click.UsageError as error:
        sentence, code = describe_usage_error(error), EXIT_USAGE
    except ConfigError as error:
        sentence, code = str(error), EXIT_CONFIG
    except StartError as error:
        sentence, code = f"error: {error}", EXIT_FAILED
    except UnicodeEncodeError as error:
        lacks = error.object[error.start : error.end]
        sentence, code = f"error: {error.encoding} has no {lacks!a}; set PYTHONIOENCODING=utf-8", EXIT_FAILED
    except OSError as error:
        sentence, code = f"error: {error.filename or 'cannot write'}: {error.strerror}", EXIT_FAILED
        if error.filename is None:  # standard output, on a full disk: nor is what is left written at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except click.Abort:
        sentence, code = "stopped", EXIT_INTERRUPTED
    else:
        return code
    print_stderr(_SECRET.sub("...", sentence))
    return code


@click.group(cls=Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def tracefit() -> None:
    """Learns latency coefficients of vLLM from its telemetry, online."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    configure_logs(Clock())


# --- the sidecar ------------------------------------------------------------------------------------------------------


@tracefit.command(epilog=RUN_EPILOG)
@click.option("--listen", type=host_port, metavar="HOST:PORT", help="Where OTLP over gRPC comes in (127.0.0.1:4317).")
@click.option("--pages", type=host_port, metavar="HOST:PORT", help="Where metrics and pages are (0.0.0.0:9464).")
@click.option("--dir", "directory", metavar="DIR", help="Where the files go (snapshots).")
@click.option(
    "--scrape", multiple=True, metavar="URL", help="Learn from a server's own page of metrics; may be repeated."
)
@config_options
def run(*, scrape: tuple[str, ...], config: Path | None, profile: str | None, **keys: str | None) -> int:
    """Receive telemetry, learn, publish."""
    clock = Clock()
    from .app import Sidecar  # noqa: PLC0415
    from .app import run as serve  # noqa: PLC0415

    given = {f"{ENV_PREFIX}{key.upper()}": value for key, value in keys.items() if value is not None}
    loaded = load_or_degrade(config, {**os.environ, **given}, profile, lambda wanted: Sidecar(wanted, clock))
    loaded = loaded._replace(config=scraping(loaded.config, scrape))
    return EXIT_OK if serve(loaded, clock) else EXIT_FAILED


@tracefit.command()
@click.option("--speed", type=Number(0.01), default=20.0, metavar="N", help="Times as recorded (20).")
@click.option("--gpu", is_flag=True, help="What vLLM on an H100 would send, from measured kernel times.")
@click.option(
    "--dir",
    "directory",
    type=DIRECTORY,
    metavar="DIR",
    help="Its files go here (snapshots/demo); of --gpu, the replica's name.",
)
@click.option(
    "--throttle",
    type=Number(0.01, 100.0),
    default=1.0,
    metavar="N",
    help="From its middle on, the recorded machine takes N times as long (1).",
)
@click.option(
    "--kv-reads",
    type=click.IntRange(1, 5),
    default=1,
    metavar="N",
    help="Of --gpu: from its middle on, decode takes N times as long to read the KV cache (1; at most 5).",
)
@json_option
def demo(*, speed: float, gpu: bool, directory: Path | None, throttle: float, kv_reads: int, in_json: bool) -> int:
    """Watch a real sidecar learn from a recording, 20 times faster."""
    from collector.commands import demo as made  # noqa: PLC0415

    if kv_reads != 1 and not gpu:
        raise ConfigError("--kv-reads", "the default demo plays a recorded CPU; give --gpu, too")
    directory = directory or Path("snapshots", "demo")
    tape = made.read_tape(made.find_recording(gpu=gpu))
    return _written(
        partial(made.demo, tape, speed, directory, made.Slowdown(throttle, kv_reads), gpu=gpu),
        directory,
        in_json=in_json,
    )


# --- questions --------------------------------------------------------------------------------------------------------


@tracefit.command()
@asks_snapshot
def show(**options: Any) -> Report:
    """What a snapshot says: coefficients, error bars, verdict."""
    from collector.commands.ask import show as answer  # noqa: PLC0415

    return answer(**options)


@tracefit.command()
@asks((*questions.STEP, *questions.LOAD, questions.NOW))
@asks_snapshot
def predict(*, snapshot: Snapshot, which: str, now: bool, **question: Any) -> Report:
    """What one step costs, or what requests see at a load.

    A step is --requests, --prefill and --context; a load is --prompt, --output and --concurrency.
    """
    from collector.commands.ask import ask  # noqa: PLC0415

    return ask(snapshot, questions.read_prediction(question), which, now=now)


@tracefit.command()
@asks((*questions.SIZED, questions.RATE, *questions.TARGETS, *questions.LIMITS))
@asks_snapshot
def plan(*, snapshot: Snapshot, which: str, **question: Any) -> Report:
    """How many requests fit the targets, and what limits them.

    One target at least: --itl, --ttft or --rate.
    """
    from collector.commands.ask import ask  # noqa: PLC0415

    return ask(snapshot, questions.read_plan(question), which)


@tracefit.command()
@snapshot_argument("before")
@snapshot_argument("after")
@token_option
@reports
def diff(*, before: str, after: str, token_file: Path | None) -> Report:
    """Which coefficients moved from one snapshot to another."""
    from collector.commands import ask  # noqa: PLC0415

    return ask.diff(*(ask.load_snapshot(source, token_file) for source in (before, after)))


@tracefit.command()
@click.argument("url", metavar="HOST:PORT")
@token_option
@reports
def doctor(*, url: str, token_file: Path | None) -> Report:
    """What a sidecar or an inference server lacks, and what to change."""
    from collector.commands.ask import read_token  # noqa: PLC0415
    from collector.commands.doctor import doctor as examine  # noqa: PLC0415

    return examine(url, read_token(token_file))


@tracefit.command()
@snapshot_argument("snapshot")
@click.option(
    "--format",
    "file_format",
    required=True,
    type=click.Choice(["blis-yaml", "blis-flags", "blis-trace"]),
    help="See docs/blis.md; of blis-trace, FILE is a recording.",
)
@click.option("--model-config", type=FILE, metavar="FILE", help="The model's config.json.")
@click.option("--hardware", metavar="NAME", help="GPU, or its memory bandwidth in TB/s.")
@click.option(
    "--alpha",
    type=click.Choice(["server", "effective"]),
    default="server",
    help="See docs/blis.md (server).",
)
@out_option("Where the result goes (standard output); of blis-trace, a directory", required=False, of=FILE)
@which_option
@token_option
@json_option
def export(*, snapshot: str, file_format: str, out: Path | None, in_json: bool, **options: Any) -> int:
    """A snapshot's coefficients for other programs."""
    from collector.commands.export import export_snapshot, export_traffic  # noqa: PLC0415

    if file_format != "blis-trace":
        return deliver(partial(export_snapshot, snapshot, file_format=file_format, **options), out, in_json=in_json)
    if out is None or out.is_file():
        raise ConfigError("--out", "a trace is two files; say in which directory")
    return deliver(partial(export_traffic, Path(snapshot), out), None, in_json=in_json)


# --- recordings and fleets --------------------------------------------------------------------------------------------


@tracefit.command()
@many("files", "FILE")
@click.option(
    "-o", "--out", "--snapshot", required=True, type=NEW_FILE, metavar="OUT", help="Where the coefficients go."
)
@click.option("--state", type=NEW_FILE, metavar="OUT", help="Save what was learned, for donors and merges.")
@with_config
@json_option
def replay(*, files: tuple[Path, ...], out: Path, state: Path | None, config: Config, in_json: bool) -> int:
    """Learn from recordings: files, directories, or - (standard input)."""
    from collector.commands import replay as made  # noqa: PLC0415

    stdin = getattr(sys.stdin, "buffer", None)  # closed by whoever started us
    work = partial(made.replay, files, out, config, state=state, stdin=stdin)
    return _written(work, out, in_json=in_json)


@tracefit.group()
def fleet() -> None:
    """What many sidecars learned, as one: docs/fleet.md."""


@fleet.command("pull")
@click.argument("sources", nargs=-1, required=True, type=state_source, metavar="SOURCE...")
@out_option("Where the fleet's files go", of=DIRECTORY)
@click.option("--every", type=interval, metavar="TIME", help="Again and again, like 5m, with pages of its own.")
@token_option
@with_config
@json_option
def fleet_pull(
    *,
    sources: tuple[str, ...],
    out: Path,
    every: float | None,
    token_file: Path | None,
    config: Config,
    in_json: bool,
) -> int:
    """Gather states, merge them by configuration, name who differs.

    A SOURCE is http://HOST:PORT, dns+http://NAME:PORT, a directory or a state file.
    """
    if every is not None and in_json:
        raise ConfigError("--json", "not with --every, which serves its result at /snapshot")
    from collector.commands.ask import read_token  # noqa: PLC0415
    from collector.fleet.pull import Puller, pull_once  # noqa: PLC0415
    from collector.fleet.service import FleetService, serve_fleet  # noqa: PLC0415

    token = partial(read_token, token_file)  # before each round, so that a new one takes effect
    token()
    puller = Puller(sources, out, config, token=token)
    if every is None:
        return _written(partial(pull_once, puller), out, in_json=in_json)
    set_log_level(config.log_level)
    service = FleetService(puller, config, Clock(), interval_s=every)
    return EXIT_OK if serve_fleet(service) else EXIT_FAILED


@fleet.command("replay")
@click.argument("recordings", nargs=-1, required=True, metavar="PATH|URL...")
@out_option("Where the fleet's files go", of=DIRECTORY)
@click.option("--ray", default="local", metavar="ADDRESS", help="A Ray cluster: HOST:PORT or auto (default: one here).")
@with_config
@json_option
def fleet_replay(*, recordings: tuple[str, ...], out: Path, ray: str, config: Config, in_json: bool) -> int:
    """Learn recordings of many engines in bulk, on Ray."""
    from collector.fleet.replay import replay_fleet  # noqa: PLC0415

    return _written(partial(replay_fleet, recordings, out, config, ray), out, in_json=in_json)


@tracefit.group()
def lab() -> None:
    """Compare modelling systems, pool what was learned elsewhere."""


@lab.command("evaluate")
@many("files", "FILE")
@out_option("Every number as JSON", required=False)
@click.option(
    "--learn-until",
    type=Number(0.0, 1.0, min_open=True, max_open=True),
    default=0.6,
    metavar="SHARE",
    help="Part of each to learn from (0.6).",
)
@click.option("--systems", default="", metavar="NAMES", help="Comma-separated; all nine by default.")
@click.option(
    "--protocol",
    type=click.Choice(["hold-out", "predict-then-learn"]),
    default="hold-out",
    help="What is scored: the end, frozen, or each step before it is learned (hold-out).",
)
@click.option("--leave-out", type=click.Choice(["model", "workload"]), help="What donors lack.")
@with_config
@json_option
def lab_evaluate(
    *,
    files: tuple[Path, ...],
    systems: str,
    leave_out: str | None,
    config: Config,
    in_json: bool,
    **options: Any,
) -> int:
    """Compare every modelling system on recordings."""
    from collector.evaluate.command import evaluate_recordings  # noqa: PLC0415

    names = tuple(name.strip() for name in systems.split(",") if name.strip())
    with _aside(in_json=in_json):
        code, document = evaluate_recordings(files, config, systems=names, leave_out=leave_out or "", **options)
    if in_json:
        print_stdout(document.decode())
    return code


@lab.command("donors")
@many("paths", "DIR")
@reports
def lab_donors(*, paths: tuple[Path, ...]) -> Report:
    """Which configuration to measure next, by saved states."""
    from collector.evaluate.donors import compare_donors  # noqa: PLC0415

    return compare_donors(paths)


@lab.command("merge")
@many("states", "STATE")
@out_option("The merged state")
@click.option("--snapshot", type=NEW_FILE, metavar="OUT", help="Its coefficients as well, and who differs.")
@with_config
@json_option
def lab_merge(*, states: tuple[Path, ...], out: Path, snapshot: Path | None, config: Config, in_json: bool) -> int:
    """Add what several sidecars learned into one state."""
    from collector.fleet.pull import merge_files  # noqa: PLC0415

    return deliver(partial(merge_files, states, out, config, snapshot), None, in_json=in_json)


# --- the configuration ---------------------------------------------------------------------------


@tracefit.group("config")
def configuration() -> None:
    """Check, explain or describe the configuration."""


changed_option = click.option(
    "--changed", is_flag=True, help="Only the keys that a file, a variable or a profile sets."
)


@configuration.command("check")
@changed_option
@config_options
@reports
def config_check(*, changed: bool, config: Path | None, profile: str | None) -> Report:
    """Check it, and print it with what sets each key."""
    from collector.app import Sidecar  # noqa: PLC0415

    keys, set_by = read_keys(config, os.environ, profile)
    loaded = check_keys(keys, set_by)
    Sidecar(loaded, Clock())  # to make one is to check it
    tree = {key: value for key, value in config_tree(loaded).items() if key in set_by or not changed}
    return Report(lines=[as_yaml(tree, set_by)], document=tree)


@configuration.command("explain")
@click.argument("key", default="")
@changed_option
@config_options
@reports
def config_explain(*, key: str, changed: bool, config: Path | None, profile: str | None) -> Report:
    """What a key means and takes; without KEY, every key. What is set is marked."""
    set_by: dict[str, str] = {}
    with contextlib.suppress(ConfigError):  # who has a wrong file asks what a key means
        _, set_by = read_keys(config, os.environ, profile)
    try:
        lines, document = explain_key(key.removeprefix(ENV_PREFIX).lower(), set_by, changed=changed)
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    return Report(lines=lines, document=document)


@configuration.command("schema")
@reports
def config_schema() -> Report:
    """The JSON Schema of the configuration, for editors."""
    schema = json_schema()
    return Report(lines=[questions.as_json(schema)], document=schema)


# --- how a command speaks ---------------------------------------------------------------------------------------------


def _aside(*, in_json: bool) -> contextlib.AbstractContextManager[object]:
    """The report for eyes goes to standard error, where a document is on standard output."""
    return contextlib.redirect_stdout(sys.stderr) if in_json else contextlib.nullcontext()


def _written(work: Callable[[], int], out: Path, *, in_json: bool) -> int:
    """The exit code of what writes a snapshot, to a file or into a directory; with ``--json`` the snapshot, too."""
    with _aside(in_json=in_json):
        code = work()
    if code == EXIT_OK and in_json:
        from exporters.snapshot_file import SNAPSHOT_NAME  # noqa: PLC0415

        print_stdout((out / SNAPSHOT_NAME if out.is_dir() else out).read_text(encoding="utf-8").rstrip("\n"))
    return code
