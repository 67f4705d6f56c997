"""``tracefit export``: one configuration of a snapshot file in the form of another program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from collector.runtime import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PrintLine, StartError
from exporters.files import (
    Assumptions,
    ExportError,
    choose_config,
    doubtful_coefficients,
    export,
    render_csv,
    render_dynamo,
    render_llm_d_sim,
    write_atomically,
)
from online import ConfigSnapshot, Snapshot


class ExportOptions(NamedTuple):
    """What the command line chose; see ``exporters.files.blis.blis_coefficients`` and ``Assumptions``."""

    file_format: str
    config_id: str | None = None
    model_config: Path | None = None
    hardware: str | None = None
    alpha: str = "server"
    mean: bool = False
    require: str | None = None
    assumptions: Assumptions = Assumptions()
    out: Path | None = None


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
    if not options.file_format.startswith("blis-"):
        return _translate(snapshot, options, say=say, note=note)
    model_config = _read_model_config(options.model_config) if options.model_config is not None else None
    try:
        exported = export(
            snapshot,
            file_format=options.file_format,
            config_id=options.config_id,
            model_config=model_config,
            hardware=options.hardware,
            alpha=options.alpha,
            mean=options.mean,
        )
    except ExportError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if _is_refused(exported.doubtful, options, note):
        return EXIT_FAILED
    say(exported.content.decode().removesuffix("\n"))
    return EXIT_OK


def _translate(snapshot: Snapshot, options: ExportOptions, *, say: PrintLine, note: PrintLine) -> int:
    """For programs that do not read coefficients: what these say is worked out by the client."""
    try:
        if options.file_format == "csv":
            named = snapshot.configs if options.config_id is None else [choose_config(snapshot, options.config_id)]
            if options.require and _is_refused([each for c in named for each in _all_doubtful(c)], options, note):
                return EXIT_FAILED
            text = render_csv(snapshot, named)
        else:
            config = choose_config(snapshot, options.config_id)
            if _is_refused(doubtful_coefficients(config), options, note):
                return EXIT_FAILED
            if options.file_format == "dynamo":
                return _write_directory(options.out, render_dynamo(snapshot, config, options.assumptions), note)
            text = render_llm_d_sim(snapshot, config, options.assumptions)
    except ExportError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    say(text.decode().removesuffix("\n"))
    return EXIT_OK


def _all_doubtful(config: ConfigSnapshot) -> list[str]:
    return [f"{config.config_id!r} {each}" for each in doubtful_coefficients(config, config.targets)]


def _is_refused(doubtful: Sequence[str], options: ExportOptions, note: PrintLine) -> bool:
    """Whether what is not identified is too much; if it is not, it is warned of."""
    if options.require is not None and doubtful:
        note(f"error: --require {options.require}: {len(doubtful)} not: {'; '.join(doubtful)}")
        return True
    for coefficient in doubtful:
        note(f"warning: not identified: {coefficient}")
    return False


def _write_directory(out: Path | None, files: Mapping[str, bytes], note: PrintLine) -> int:
    if out is None:
        note("error: --out: dynamo reads a directory; say which")
        return EXIT_USAGE
    try:
        for name, data in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out / name, data)
    except OSError as error:
        raise StartError(f"cannot write to {out}: {error.strerror}") from None
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
