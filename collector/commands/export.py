"""``tracefit export``: one configuration of a snapshot in the form of another program."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import tracefit
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from exporters.files import BlisError, choose_config, export, warnings_of
from online import Snapshot

from .answers import load_snapshot


class ExportOptions(NamedTuple):
    """What the command line chose; see ``exporters.files.blis.blis_coefficients``."""

    file_format: str
    which: str = ""
    model_config: Path | None = None
    hardware: str | None = None
    alpha: str = "server"
    mean: bool = False
    require: str | None = None


def export_asked(arguments: argparse.Namespace, say: PrintLine, note: PrintLine) -> int:
    """Run ``tracefit export`` on what the command line says.

    Raises:
        StartError: a file cannot be read, an address does not answer, or what is there is no snapshot.
    """
    options = ExportOptions(
        file_format=arguments.format,
        which=arguments.config,
        model_config=arguments.model_config,
        hardware=arguments.hardware,
        alpha=arguments.alpha,
        mean=arguments.mean,
        require=arguments.require,
    )
    return _export_snapshot(load_snapshot(arguments.snapshot, arguments.token_file), options, say=say, note=note)


def _export_snapshot(loaded: tracefit.Snapshot, options: ExportOptions, *, say: PrintLine, note: PrintLine) -> int:
    """Print the export.

    Args:
        loaded: the snapshot, from wherever it came.
        options: which configuration, and how.
        say: takes the export.
        note: takes the sentence that says what is missing, and a warning of each coefficient that is not identified.

    Raises:
        StartError: a file cannot be read, or the document is none that this version writes.
    """
    snapshot = _read_snapshot(loaded)
    model_config = _read_model_config(options.model_config) if options.model_config is not None else None
    try:
        exported = export(
            snapshot,
            file_format=options.file_format,
            which=options.which,
            model_config=model_config,
            hardware=options.hardware,
            alpha=options.alpha,
            mean=options.mean,
        )
    except BlisError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if _is_refused(exported.doubtful, options, note):
        return EXIT_FAILED
    for warning in exported.warnings:
        note(f"warning: {warning}")
    config = choose_config(snapshot, options.which)
    for warning in warnings_of(config):
        note(f"warning: {config.config_id}: {warning}")
    say(exported.content.decode().removesuffix("\n"))
    return EXIT_OK


def _is_refused(doubtful: Sequence[str], options: ExportOptions, note: PrintLine) -> bool:
    """Whether what is not identified is too much; if it is not, it is warned of."""
    if options.require is not None and doubtful:
        note(f"error: --require {options.require}: {len(doubtful)} not: {'; '.join(doubtful)}")
        return True
    for coefficient in doubtful:
        note(f"warning: not identified: {coefficient}")
    return False


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None


def _read_snapshot(loaded: tracefit.Snapshot) -> Snapshot:
    try:
        return Snapshot.from_json(loaded.data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StartError(f"the snapshot cannot be exported: {error}") from None


def _read_model_config(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise StartError(f"--model-config: {path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise StartError(f"--model-config: {path}: expected an object, got {type(tree).__name__}")
    return tree
