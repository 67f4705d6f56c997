"""``tracefit evaluate``: files in, text out, JSON on request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from collector import __version__
from collector.config import Config, ConfigError
from collector.decode.kv import KvBatch
from collector.identity import Knowledge
from collector.receive import Export
from collector.recordings import by_source, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, PrintLine, Progress, StartError
from collector.worker import make_pipeline
from exporters.snapshot_file import write_atomically
from online import Snapshot
from online.features import registered

from .captures import Capture, load
from .fits import NINE, SHAPE_SUFFIX
from .kv_beside import with_kv_beside
from .leave_out import group
from .page_windows import PageReport, evaluate_pages, load_pages
from .protocol import evaluate
from .tables import lines

_READING = 0.2
"""Share of the time that reading takes, about."""


class EvaluateOptions(NamedTuple):
    """What the command line said."""

    json: Path | None = None
    snapshot: Path | None = None
    learn_until: float = 0.6
    systems: tuple[str, ...] = ()
    leave_out: str = ""


def evaluate_recordings(
    paths: Sequence[Path], config: Config, options: EvaluateOptions, clock: Clock, *, say: PrintLine, note: PrintLine
) -> int:
    """Evaluate all systems on the recordings.

    Args:
        paths: recordings, or directories of them; each is a source of its own, or one of a rotation.
        config: rules, model files and hardware of the ``configurations`` section; bounds of the join.
        options: see ``tracefit evaluate --help``.
        clock: for the progress only.
        say: receives the report, line by line.
        note: receives progress and warnings.

    Returns:
        Exit code: failed if no recording had anything to score.
    """
    systems = options.systems or ("portable" + SHAPE_SUFFIX, *NINE)
    for system in systems:
        if system.removesuffix(SHAPE_SUFFIX) not in registered():
            raise ConfigError("--systems", f"{system!r} is not one of {', '.join(registered())}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise StartError(f"cannot write {options.json}: there is no such directory")
    snapshot = _snapshot(options.snapshot)
    knowledge = Knowledge(config.configurations)
    captures: list[Capture] = []
    pages: list[PageReport] = []
    sources = list(with_kv_beside(by_source(open_recordings(paths, note)), note))
    with Progress("evaluated", 1.0, clock, note, unit="") as progress:
        for number, (recordings, kv) in enumerate(sources):
            progress.advance_to(_READING * number / len(sources), f"reading {recordings[0].label}")
            found = load(recordings, knowledge, config.join, options.learn_until, partial(published_of, config), kv)
            captures += found
            readings = {} if found else load_pages([recording.path for recording in recordings])
            pages += [evaluate_pages(name, of_engine, options.learn_until) for name, of_engine in readings.items()]
        _unique_names(captures)
        report = evaluate(
            captures,
            systems,
            learn_until=options.learn_until,
            left_out=options.leave_out or _default_key(captures),
            version=__version__,
            tell=lambda share, what: progress.advance_to(_READING + (1.0 - _READING) * share, what),
            snapshot=snapshot,
            pages=pages,
        )
    note(f"evaluated {len(sources)} {'source' if len(sources) == 1 else 'sources'} in {progress.elapsed_s:.1f} s")
    for line in lines(report):
        say(line)
    _write(options.json, msgspec.json.encode(report), say)
    scored = any(capture.scores for capture in report.captures) or any(each.scores for each in report.pages)
    return EXIT_OK if scored else EXIT_FAILED


def published_of(config: Config, exports: Sequence[Export], kv: Sequence[KvBatch] = ()) -> Snapshot:
    """What the default learner publishes of these exports and KV events."""
    pipeline = make_pipeline(replace(config, learners=("rls",), feature_sets=("portable",)))
    pipeline.process_kv(kv)
    pipeline.process(exports)
    pipeline.flush()
    return pipeline.snapshot(0, 1)


def _default_key(captures: Sequence[Capture]) -> str:
    """Models are left out where there are several, else workloads."""
    return "model" if len({group(capture, "model") for capture in captures}) > 1 else "workload"


def _unique_names(captures: Sequence[Capture]) -> None:
    captures_by_name: dict[str, int] = {}
    for capture in captures:
        captures_by_name[capture.name] = captures_by_name.get(capture.name, 0) + 1
        if captures_by_name[capture.name] > 1:
            capture.name = f"{capture.name}#{captures_by_name[capture.name]}"


def _snapshot(path: Path | None) -> Snapshot | None:
    if path is None:
        return None
    try:
        return Snapshot.from_json(path.read_bytes())
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise StartError(f"{path} is no snapshot: {error}") from None


def _write(path: Path | None, data: bytes, say: PrintLine) -> None:
    if path is None:
        return
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
    say(f"written: {path}")
