"""``tracefit export``: one configuration of a snapshot in the form of another program."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import tracefit
from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine, StartError
from exporters.blis import BlisError, choose_config, export, warnings_of
from online import Snapshot

from .answers import load_snapshot


def export_asked(arguments: argparse.Namespace, say: PrintLine, note: PrintLine) -> int:
    """Print what ``tracefit export`` is asked for.

    Args:
        arguments: what the command line says.
        say: takes the export.
        note: takes the sentence that says what is missing, and a warning of each coefficient that is not identified.

    Raises:
        StartError: a file cannot be read, an address does not answer, or what is there is no snapshot of this version.
    """
    snapshot = _read_snapshot(load_snapshot(arguments.snapshot, arguments.token_file))
    model_config = _read_model_config(arguments.model_config) if arguments.model_config is not None else None
    try:
        exported = export(
            snapshot,
            file_format=arguments.format,
            which=arguments.config,
            model_config=model_config,
            hardware=arguments.hardware,
            alpha=arguments.alpha,
            mean=arguments.mean,
        )
    except BlisError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if arguments.require is not None and exported.doubtful:
        doubtful = "; ".join(exported.doubtful)
        note(f"error: --require {arguments.require}: {len(exported.doubtful)} not: {doubtful}")
        return EXIT_FAILED
    config = choose_config(snapshot, arguments.config)
    for warning in (
        *(f"not identified: {coefficient}" for coefficient in exported.doubtful),
        *exported.warnings,
        *(f"{config.config_id}: {warning}" for warning in warnings_of(config)),
    ):
        note(f"warning: {warning}")
    say(exported.content.decode().removesuffix("\n"))
    return EXIT_OK


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
