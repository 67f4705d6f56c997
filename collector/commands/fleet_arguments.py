"""The arguments of ``tracefit fleet``; imports nothing heavy, since every ``tracefit --help`` reads it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collector.config import profile_names

from .arguments import positive_number, share, whole_number

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
    action = actions.add_parser("replay", help="learn recordings of many engines in bulk, here or on a Ray cluster")
    action.add_argument(
        "places", nargs="+", metavar="PATH|URL", help="recordings, directories of them, s3://BUCKET/PREFIX, or -"
    )
    action.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="where the fleet's files go")
    action.add_argument(
        "--ray", default="", metavar="ADDRESS", help="a Ray cluster: HOST:PORT, auto, or local for one here"
    )
    action.add_argument("--workers", type=whole_number, metavar="N", help="processes without Ray (default: one a core)")
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
