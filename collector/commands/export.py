"""``tracefit export``: one configuration of a snapshot file in the form of another program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from exporters.files import BlisError, export
from online import Snapshot


class ExportOptions(NamedTuple):
    """What the command line chose; see ``exporters.files.blis.blis_coefficients``."""

    file_format: str
    config_id: str | None = None
    model_config: Path | None = None
    hardware: str | None = None
    alpha: str = "server"
    require: str | None = None


def export_snapshot(path: Path, options: ExportOptions, *, say: PrintLine, note: PrintLine) -> int:
    """Print the export.

    Args:
        path: the snapshot file.
        options: which configuration, and how.
        say: takes the export.
        note: takes the sentence that says what is missing, and a warning of each coefficient that is not identified.

    Raises:
        StartError: a file cannot be read.
    """
    snapshot = _read_snapshot(path)
    model_config = _read_model_config(options.model_config) if options.model_config is not None else None
    try:
        exported = export(
            snapshot,
            file_format=options.file_format,
            config_id=options.config_id,
            model_config=model_config,
            hardware=options.hardware,
            alpha=options.alpha,
        )
    except BlisError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if options.require is not None and exported.doubtful:
        note(f"error: --require {options.require}: {len(exported.doubtful)} not: {'; '.join(exported.doubtful)}")
        return EXIT_FAILED
    for coefficient in exported.doubtful:
        note(f"warning: not identified: {coefficient}")
    say(exported.content.decode().removesuffix("\n"))
    return EXIT_OK


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None


def _read_snapshot(path: Path) -> Snapshot:
    try:
        return Snapshot.from_json(_read_bytes(path))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise StartError(f"{path} is no snapshot: {error}") from None


def _read_model_config(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise StartError(f"--model-config: {path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise StartError(f"--model-config: {path}: expected an object, got {type(tree).__name__}")
    return tree
