"""``tracefit lab evaluate``: files in, one table per capture and one of what transfers out; JSON on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from collector import __version__
from collector.config import Config, ConfigError
from collector.identity import Knowledge
from collector.recordings import Timed, by_kind, by_source, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, Clock, note, progress, say
from collector.service import make_pipeline
from exporters.snapshot_file import write_atomically
from online import Snapshot
from online.features import registered

from .baselines import WINDOW_S, PageReport, evaluate_pages, load_pages
from .captures import Capture, load, with_kv_beside
from .online import OnlineReport, predict_then_learn
from .protocol import CaptureReport, Report, Tell, evaluate
from .systems import NINE, SHAPE_SUFFIX, Score, plain_name
from .transfer import FIRST_ROWS, Transfer, group

COLUMNS = {
    "system": "system",
    "columns": "columns",
    "step_mape": "step %",
    "step_median": "median",
    "step_p90": "p90",
    "pearson_r": "r",
    "prequential_mape": "preq %",
    "gpu_time_mape": "GPU time",
    "e2e": "E2E",
    "e2e_full": "E2E full",
    "ttft": "TTFT",
    "itl": "ITL",
    "p99": "p99",
    "coverage": "cover %",
    "queue_wait_mdape": "wait %",
    "api_queueing_mdape": "API %",
}
"""Figure of a score, and its heading; ratios are shown in per cent, except r."""
REQUEST_COLUMNS = {
    "model": "model",
    "ttft_median": "TTFT median",
    "ttft_p90": "p90",
    "tpot_median": "TPOT median",
    "tpot_p90": "p90",
}
PAGE_COLUMNS = {"model": "model", "mean": "mean", "median": "median", "note": ""}
ONLINE_COLUMNS = {"model": "model", "mape": "MAPE", "p95": "p95", "missing": "missing", "last": "last 30 %"}


def lines(report: Report) -> Iterator[str]:
    """The report as text, line by line."""
    for capture in report.captures:
        yield from _capture(capture)
    for pages in report.pages:
        yield ""
        yield (
            f"{pages.name}  {pages.pages} pages, learned from {pages.learned_rows} rows, scored on {pages.windows} "
            f"windows of {WINDOW_S:g} s: error of the mean inter-token latency in %"
        )
        yield from tabulate(pages.scores, PAGE_COLUMNS)
    if report.transfers:
        yield ""
        yield f"Leave one {report.left_out} out: mean step error in %, nothing of its own / after its first rows (cold)"
        for name, transfers in report.transfers.items():
            yield f"  {name}"
            yield from tabulate([_transfer(each) for each in transfers])


def _capture(capture: CaptureReport) -> Iterator[str]:
    yield ""
    kind = "interval rows" if capture.interval_rows else "steps"
    yield (
        f"{capture.name}  telemetry={capture.telemetry}  learned from {capture.learned_rows} rows, scored on "
        f"{capture.scored_rows} {kind} and {capture.scored_requests} requests "
        f"({capture.uncovered_requests} left out: their path is not covered)"
    )
    if capture.dropped_rows:
        yield "  not rows: " + ", ".join(f"{reason} {count}" for reason, count in capture.dropped_rows.items())
    if capture.cannot_derive:
        yield f"  systems that need a sheet are not here, missing: {', '.join(capture.cannot_derive)}"
    of_columns = [{**each, "columns": f"{each['identifiable']}/{each['columns']}"} for each in capture.scores]
    yield from tabulate(of_columns, COLUMNS)
    if capture.scores and (served := capture.served) is not None:
        numbers = f"learned from {served.learned}, judged on the last {served.judged}"
        yield f"  single requests: {numbers}, relative error in %"
        yield from tabulate(served.scores, REQUEST_COLUMNS)
        if served.note:
            yield f"  {served.note}"


def _transfer(each: Transfer) -> Score:
    after = {
        f"{cold}@{rows}": errors.get(rows)
        for cold, errors in (("", each.after), ("cold ", each.cold))
        for rows in map(str, FIRST_ROWS)
    }
    return {
        "system": each.system,
        "variant": each.variant,
        "donors": str(each.donors),
        "zero-shot": each.zero_shot,
        **after,
    }


def online_lines(report: OnlineReport) -> Iterator[str]:
    """The report of predicting and then learning, line by line."""
    parts = [(f"{case.name}  {case.target}, {case.rows} steps", case.scores) for case in report.cases]
    parts += [("macro: the mean over these", report.macro), ("micro: over all steps", report.micro)]
    for title, scores in parts:
        yield ""
        yield f"{title}: error in %, each step predicted before it is learned"
        yield from tabulate(scores, ONLINE_COLUMNS)


def tabulate(scores: Sequence[Score], columns: Mapping[str, str] | None = None) -> Iterator[str]:
    """A table of these columns, or of those of the first score; the first to the left, numbers to the right."""
    if not scores:
        yield "  nothing to score"
        return
    columns = columns or {name: name for name in scores[0]}
    table = [[*columns.values()], *([_cell(name, score.get(name)) for name in columns] for score in scores)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *rest in table:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()


def _cell(name: str, value: float | str | None) -> str:
    """A ratio in per cent; a correlation and a word as they are; a dash for what cannot be said."""
    if isinstance(value, str):
        return value
    if value is None:
        return "-" if name != "note" else ""
    return f"{value:.3f}" if name == "pearson_r" else f"{100 * value:.1f}"


PREDICT_THEN_LEARN = "predict-then-learn"


class EvaluateOptions(NamedTuple):
    """What the command line said."""

    out: Path | None = None
    snapshot: Snapshot | None = None
    learn_until: float = 0.6
    systems: tuple[str, ...] = ()
    leave_out: str = ""
    protocol: str = "hold-out"


def evaluate_recordings(
    paths: Sequence[Path], config: Config, options: EvaluateOptions, clock: Clock
) -> tuple[int, bytes]:
    """Evaluate all systems on the recordings.

    Args:
        paths: recordings, or directories of them; each is a source of its own, or one of a rotation.
        config: rules, model files and hardware; bounds of the join.
        options: see ``tracefit lab evaluate --help``.
        clock: for the progress only.

    Returns:
        Exit code, failed if no recording had anything to score; and every number as JSON.
    """
    systems = options.systems or ("portable" + SHAPE_SUFFIX, *NINE)
    for system in systems:
        if plain_name(system) not in registered():
            raise ConfigError("--systems", f"{system!r} is not one of {', '.join(registered())}")
    started_ns = clock.monotonic_ns()
    with progress("evaluated", 0, "parts") as bar:

        def tell(what: str) -> None:
            bar.set_postfix_str(what, refresh=False)
            bar.update()

        captures, pages, sources = _read(paths, config, options, tell)
        report: Report | OnlineReport
        if options.protocol == PREDICT_THEN_LEARN:
            report = predict_then_learn(captures, __version__, tell)
            text, scored = online_lines(report), bool(report.cases)
        else:
            report = evaluate(
                captures,
                systems,
                learn_until=options.learn_until,
                left_out=options.leave_out or _default_key(captures),
                version=__version__,
                tell=tell,
                snapshot=options.snapshot,
                pages=pages,
            )
            text = lines(report)
            scored = any(capture.scores for capture in report.captures) or any(each.scores for each in report.pages)
    elapsed_s = (clock.monotonic_ns() - started_ns) / 1e9
    note(f"evaluated {sources} {'source' if sources == 1 else 'sources'} in {elapsed_s:.1f} s")
    for line in text:
        say(line)
    data = msgspec.json.encode(report)
    if options.out is not None:
        write_atomically(options.out, data)
        say(f"written: {options.out}")
    if not scored:
        note("error: there is nothing to score; give recordings of steps or requests (docs/telemetry.md)")
    return EXIT_OK if scored else EXIT_FAILED, data


def _read(
    paths: Sequence[Path], config: Config, options: EvaluateOptions, tell: Tell
) -> tuple[list[Capture], list[PageReport], int]:
    """What the recordings hold, with names that differ, and of how many sources they are."""
    knowledge = Knowledge(config)
    captures: list[Capture] = []
    pages: list[PageReport] = []
    sources = with_kv_beside(by_source(open_recordings(paths, note)), note)
    whole = options.protocol == PREDICT_THEN_LEARN
    learn_until, learn = (1.0, None) if whole else (options.learn_until, partial(published_of, config))
    for recordings in sources:
        tell(f"reading {recordings[0].label}")
        found = load(recordings, knowledge, config, learn_until, learn)
        captures += found
        readings = {} if found or whole else load_pages([recording.path for recording in recordings])
        pages += [evaluate_pages(name, of_engine, learn_until) for name, of_engine in readings.items()]
    names = Counter[str]()
    for capture in captures:
        names[capture.name] += 1
        if names[capture.name] > 1:
            capture.name = f"{capture.name}#{names[capture.name]}"
    return captures, pages, len(sources)


def published_of(config: Config, told: Sequence[Timed]) -> Snapshot:
    """What the default learner publishes of this telemetry."""
    pipeline = make_pipeline(replace(config, learners=("rls",), feature_sets=("portable",)))
    pipeline.process(**by_kind(told))
    pipeline.flush()
    return pipeline.snapshot(0, 1)


def _default_key(captures: Sequence[Capture]) -> str:
    """Models are left out where there are several, else workloads."""
    return "model" if len({group(capture, "model") for capture in captures}) > 1 else "workload"
