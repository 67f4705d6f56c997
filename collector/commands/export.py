"""``tracefit export``: one configuration of a snapshot in the form of another program."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import tracefit
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
    warnings_of,
    write_atomically,
)
from online import ConfigSnapshot, Snapshot

from .answers import load_snapshot


class ExportOptions(NamedTuple):
    """What the command line chose; see ``exporters.files.blis.blis_coefficients`` and ``Assumptions``."""

    file_format: str
    which: str = ""
    model_config: Path | None = None
    hardware: str | None = None
    alpha: str = "server"
    mean: bool = False
    require: str | None = None
    assumptions: Assumptions = Assumptions()
    out: Path | None = None


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
        assumptions=Assumptions(
            arguments.prompt,
            arguments.output,
            arguments.prefix_hit or 0.0,
            arguments.max_num_seqs,
            arguments.max_num_batched_tokens,
            arguments.kv_tokens,
        ),
        out=arguments.out,
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
    if not options.file_format.startswith("blis-"):
        return _translate(snapshot, options, say=say, note=note)
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
    except ExportError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if _is_refused(exported.doubtful, options, note):
        return EXIT_FAILED
    for warning in exported.warnings:
        note(f"warning: {warning}")
    _warn([choose_config(snapshot, options.which)], note)
    say(exported.content.decode().removesuffix("\n"))
    return EXIT_OK


def _translate(snapshot: Snapshot, options: ExportOptions, *, say: PrintLine, note: PrintLine) -> int:
    """For programs that do not read coefficients: what these say is worked out by the client."""
    try:
        if options.file_format == "csv":
            named = [choose_config(snapshot, options.which)] if options.which else snapshot.configs
            if options.require and _is_refused([each for c in named for each in _all_doubtful(c)], options, note):
                return EXIT_FAILED
            _warn(named, note)
            text = render_csv(snapshot, named)
        else:
            config = choose_config(snapshot, options.which)
            if _is_refused(doubtful_coefficients(config), options, note):
                return EXIT_FAILED
            _warn([config], note)
            if options.file_format == "dynamo":
                return _write_directory(options.out, render_dynamo(snapshot, config, options.assumptions), note)
            text = render_llm_d_sim(snapshot, config, options.assumptions)
    except ExportError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    say(text.decode().removesuffix("\n"))
    return EXIT_OK


def _warn(configs: Sequence[ConfigSnapshot], note: PrintLine) -> None:
    for config in configs:
        for warning in warnings_of(config):
            note(f"warning: {config.config_id}: {warning}")


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
