"""The arguments of commands, but for questions and demo; nothing heavy is imported, as every ``--help`` reads them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from .arguments import share_within_one, whole_number
from .questions import EXPORT_FORMATS, add_choice_option, add_token_option


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
    replay.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help="learn engine by engine in N processes (0: one a core), and merge",
    )


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
