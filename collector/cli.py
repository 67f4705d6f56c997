"""``tracefit``: argv in, exit code out (0 done, 1 failed, 2 usage, 78 bad configuration, 130 Ctrl-C).

The commands are imported when they run, and nothing that is imported here imports numpy or grpc: the environment below
has to be set before they are, and ``--help`` should not cost a second.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from collector import __version__
from collector.commands.arguments import (
    EPILOG,
    CommandParser,
    add_check_arguments,
    add_completion_option,
    add_demo_parser,
    add_donors_arguments,
    add_evaluate_arguments,
    add_export_arguments,
    add_fleet_parser,
    add_json_options,
    add_merge_arguments,
    add_question_parsers,
    add_replay_arguments,
    add_run_arguments,
)
from collector.config import (
    ENV_FILE,
    Config,
    ConfigError,
    explain_key,
    json_schema,
    load,
    load_or_degrade,
    profile_names,
    scraping,
    to_tree,
    to_yaml,
)
from collector.runtime import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    PrintLine,
    StartError,
    Stop,
    SystemClock,
    SystemFiles,
    check_packages,
    configure_logs,
    in_thread,
    package_files,
    print_in_any_encoding,
    remarks_on,
    set_log_format,
    set_log_level,
)

_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # small solves only; more threads cost memory and reproducibility
    "GRPC_VERBOSITY": "NONE",  # the core prints its own view of a failed bind beside our sentence
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, translate errors; never a traceback for what the user can mend."""
    print_in_any_encoding()
    try:
        arguments = _parser().parse_args(argv)
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        configure_logs(SystemClock())
        check_packages(package_files())
        code: int = arguments.command(arguments)
    except ConfigError as error:
        _warn(str(error))
        return EXIT_USAGE if error.key.startswith("--") else EXIT_CONFIG
    except StartError as error:
        _warn(f"error: {error}")
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):  # `tracefit replay … | head`; a full disk
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not written at exit, either
        if error.errno == errno.ENOSPC:
            _warn(f"error: cannot write: {error.strerror}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        _warn("stopped")
        return EXIT_INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tracefit", description="Learns latency coefficients of vLLM from its telemetry, online.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"tracefit {__version__}")
    add_completion_option(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="receive telemetry, learn, publish")
    add_run_arguments(run)
    run.set_defaults(command=_run)
    replay = commands.add_parser("replay", help="learn from recordings")
    add_replay_arguments(replay)
    replay.set_defaults(command=_replay)
    export = commands.add_parser("export", help="a snapshot's coefficients for other programs")
    add_export_arguments(export)
    export.set_defaults(command=_export)
    add_demo_parser(commands, _demo)
    evaluate = commands.add_parser("evaluate", help="compare every modelling system on recordings")
    add_evaluate_arguments(evaluate)
    evaluate.set_defaults(command=_evaluate)
    donors = commands.add_parser("donors", help="pool saved states: what they know, what to measure next")
    add_donors_arguments(donors)
    donors.set_defaults(command=_donors)
    merge = commands.add_parser("merge", help="add what several sidecars learned into one state")
    add_merge_arguments(merge)
    merge.set_defaults(command=_merge)
    add_fleet_parser(commands, _fleet_pull, _fleet_replay)
    add_question_parsers(commands, _ask)
    check = commands.add_parser("check-config", help="check the configuration and print what holds")
    add_check_arguments(check)
    check.set_defaults(command=_check_config)
    version = commands.add_parser("version", help="this version, what it runs on, what it reads and writes")
    version.set_defaults(command=_version)
    add_json_options((donors, check, version), writers=(replay, merge))
    for command in (run, replay, evaluate, merge, check):
        command.add_argument("--config", type=Path, metavar="FILE", help=f"YAML (default: ${ENV_FILE})")
    for command in (run, replay, check):
        command.add_argument("--profile", choices=profile_names(), help="start from a configuration that comes along")
    return parser


def _path(arguments: argparse.Namespace) -> Path | None:
    named = os.environ.get(ENV_FILE)
    return arguments.config or (Path(named) if named else None)


def _load(arguments: argparse.Namespace) -> Config:
    return load(_path(arguments), os.environ, vars(arguments).get("profile"))


def _run(arguments: argparse.Namespace) -> int:
    clock = SystemClock()
    from .app import run  # noqa: PLC0415
    from .commands.check import check  # noqa: PLC0415

    loaded = load_or_degrade(_path(arguments), os.environ, arguments.profile, partial(check, clock=clock))
    loaded = loaded._replace(config=scraping(loaded.config, arguments.scrape))
    return EXIT_OK if run(loaded, clock, Stop()) else EXIT_FAILED


def _replay(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from collector.commands.replay import replay  # noqa: PLC0415

    code = replay(
        arguments.files,
        arguments.snapshot,
        config,
        SystemClock(),
        say=_teller(arguments),
        note=_remarks(),
        state=arguments.state,
        stdin=sys.stdin.buffer,
    )
    return _concluded(code, arguments, arguments.snapshot)


def _evaluate(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from collector.evaluate.command import EvaluateOptions, evaluate_recordings  # noqa: PLC0415

    options = EvaluateOptions(
        json=arguments.json,
        snapshot=arguments.snapshot,
        learn_until=arguments.learn_until,
        systems=tuple(name.strip() for name in arguments.systems.split(",") if name.strip()),
        leave_out=arguments.leave_out,
    )
    return evaluate_recordings(arguments.files, config, options, SystemClock(), say=_say, note=_remarks())


def _donors(arguments: argparse.Namespace) -> int:
    from collector.evaluate.donors import compare_donors  # noqa: PLC0415

    return compare_donors(arguments.paths, as_document=arguments.json, say=_say, note=_warn)


def _merge(arguments: argparse.Namespace) -> int:
    config, snapshot = _load(arguments), arguments.snapshot
    if arguments.json and snapshot is None:
        raise ConfigError("--json", "prints what --snapshot OUT writes, which is not asked for")
    from collector.fleet.pull import merge_files  # noqa: PLC0415

    say = _teller(arguments)
    code = merge_files(arguments.states, arguments.out, config, say=say, note=_warn, snapshot=snapshot)
    return _concluded(code, arguments, snapshot)


def _fleet_pull(arguments: argparse.Namespace) -> int:
    config, clock = load(_path(arguments), os.environ), SystemClock()
    from collector.fleet.pull import PullOptions, pull_once, token_reader  # noqa: PLC0415
    from collector.fleet.service import FleetService, serve_fleet  # noqa: PLC0415

    token = token_reader(arguments.token_file)
    options = PullOptions(tuple(arguments.sources), arguments.out, arguments.timeout, arguments.require, token)
    if arguments.every is None:
        code = pull_once(options, config, clock, say=_teller(arguments), note=_remarks())
        return _concluded(code, arguments, arguments.out)
    if arguments.json:
        raise ConfigError("--json", "not with --every, which serves its result at /snapshot")
    set_log_level(config.log_level)
    set_log_format(config.log_format)
    service = FleetService(options, config, clock, interval_s=arguments.every)
    return EXIT_OK if serve_fleet(service, Stop()) else EXIT_FAILED


def _fleet_replay(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from collector.fleet.replay import ReplayOptions, replay_fleet  # noqa: PLC0415

    rows = arguments.rows if "://" in arguments.rows or not arguments.rows else str(Path(arguments.rows).absolute())
    options = ReplayOptions(tuple(arguments.places), arguments.out, arguments.ray, rows)
    say = _teller(arguments)
    code = replay_fleet(options, config, SystemClock(), say=say, note=_remarks())
    return _concluded(code, arguments, arguments.out)


def _export(arguments: argparse.Namespace) -> int:
    if arguments.format == "blis-trace":
        from collector.commands.export import export_traffic  # noqa: PLC0415

        return export_traffic([Path(arguments.snapshot)], arguments.out, SystemClock(), say=_say, note=_remarks())
    from collector.commands.export import export_asked  # noqa: PLC0415

    return export_asked(arguments, _say, _warn)


def _ask(arguments: argparse.Namespace) -> int:
    from collector.commands.ask import ask  # noqa: PLC0415

    return ask(arguments, _say, _warn)


def _demo(arguments: argparse.Namespace) -> int:
    from collector.commands.demo import demo, find_recording, save_recording, send_forever, signals_as_ctrl_c  # noqa: PLC0415  # noqa: PLC0415

    if arguments.save is not None:
        save_recording(find_recording(arguments.recording), arguments.save, arguments.throttle, _say)
        return EXIT_OK
    if arguments.to is not None:

        def send(stop: Stop) -> int:
            return send_forever(arguments.recording, arguments.to, SystemClock(), stop, _say, arguments.throttle)

        return asyncio.run(in_thread(send, Stop()))
    with signals_as_ctrl_c():
        return demo(arguments.recording, arguments.speed, _say, arguments.directory, arguments.throttle)


def _check_config(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None and arguments.json:
        raise ConfigError("--json", "not with --explain; --schema is JSON, with every key")
    if arguments.schema or arguments.explain is not None:
        print(json.dumps(json_schema(), indent=2) if arguments.schema else explain_key(arguments.explain))
        return EXIT_OK
    config = _load(arguments)
    from collector.commands.check import check, remarks  # noqa: PLC0415

    check(config, SystemClock())
    for remark in remarks(config, SystemFiles()):
        _warn(f"warning: {remark}")
    print(json.dumps(to_tree(config), indent=2) + "\n" if arguments.json else to_yaml(config), end="")
    return EXIT_OK


def _version(arguments: argparse.Namespace) -> int:
    from collector.commands.version import tell_version  # noqa: PLC0415

    return tell_version(in_json=arguments.json, say=_say)


def _teller(arguments: argparse.Namespace) -> PrintLine:
    """Where the report for eyes goes: beside a document on standard output, to standard error."""
    return _warn if arguments.json else _say


def _concluded(code: int, arguments: argparse.Namespace, out: Path) -> int:
    """The exit code, after the snapshot that was written, to a file or into a directory, if it is asked for."""
    if code == EXIT_OK and arguments.json:
        from exporters.snapshot_file import SNAPSHOT_NAME  # noqa: PLC0415

        print((out / SNAPSHOT_NAME if out.is_dir() else out).read_text(encoding="utf-8").rstrip("\n"))
    return code


def _remarks() -> PrintLine:
    """For commands that take long: bars where somebody looks, lines elsewhere."""
    return remarks_on(sys.stderr, os.environ.get("TERM"), _warn)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(text, flush=True)
