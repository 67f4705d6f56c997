"""``tracefit lab evaluate``: files in, one table per capture and one of what transfers out; JSON on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import msgspec

from collector.config import Config, ConfigError
from collector.decode.kv import KvBatch
from collector.recordings import Timed, by_source, check_targets, merged, open_recordings
from collector.runtime import EXIT_FAILED, EXIT_OK, print_stderr, print_stdout
from exporters.snapshot_file import write_atomically
from online.features import registered

from .captures import Capture, load
from .online import predict_then_learn
from .protocol import evaluate
from .systems import NINE, SHAPE_SUFFIX, Document, Score, plain_name

COLUMNS = {
    "system": "system",
    "columns": "columns",
    "step_mape": "step %",
    "pearson_r": "r",
    "e2e": "E2E",
    "e2e_full": "E2E full",
    "ttft": "TTFT",
    "itl": "ITL",
    "p99": "p99",
    "coverage": "cover %",
    "queue_wait_error": "wait %",
    "api_queueing_error": "API %",
}
"""Figure of a score, and its heading; ratios are shown in per cent, except r."""
ONLINE_COLUMNS = {"model": "model", "mape": "MAPE", "p95": "p95", "missing": "missing"}


def lines(report: Document) -> Iterator[str]:
    """The report as text, line by line."""
    for capture in report["captures"]:
        yield ""
        yield (
            "{name}  telemetry={telemetry}  learned from {learned_rows} rows, scored on {scored_rows} rows and "
            "{scored_requests} requests ({uncovered_requests} left out: their path is not covered)".format(**capture)
        )
        if capture["cannot_derive"]:
            yield f"  systems that need more are not here, missing: {', '.join(capture['cannot_derive'])}"
        yield from tabulate(capture["scores"], COLUMNS)
    if report["transfers"]:
        yield ""
        left_out = report["left_out"]
        yield f"Leave one {left_out} out: mean step error in %, nothing of its own / after its first rows (cold)"
        for name, transfers in report["transfers"].items():
            yield f"  {name}"
            yield from tabulate([_transfer(**each) for each in transfers])


def _transfer(*, system: str, donors: int, zero_shot: float | None, after: Score, cold: Score) -> Score:
    by_rows = {f"{how}@{rows}": error for how, each in (("", after), ("cold ", cold)) for rows, error in each.items()}
    return {"system": system, "donors": donors, "zero-shot": zero_shot, **by_rows}


def online_lines(report: Document) -> Iterator[str]:
    """The report of predicting and then learning, line by line."""
    parts = [("{name}  {target}, {rows} steps".format(**case), case["scores"]) for case in report["cases"]]
    parts += [("macro: the mean over these", report["macro"]), ("micro: over all steps", report["micro"])]
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
    """A ratio in per cent; a correlation, a number of columns and a word as they are; a dash for what is not known."""
    if isinstance(value, str | int):
        return str(value)
    if value is None:
        return "-"
    return f"{value:.3f}" if name == "pearson_r" else f"{100 * value:.1f}"


def evaluate_recordings(
    paths: Sequence[Path],
    config: Config,
    *,
    out: Path | None = None,
    learn_until: float = 0.6,
    systems: Sequence[str] = (),
    leave_out: str = "",
    protocol: str = "hold-out",
) -> tuple[int, bytes]:
    """Evaluate all systems on the recordings, each of which is a source of its own, or one of a rotation.

    The keywords are the options of ``tracefit lab evaluate``.

    Returns:
        Exit code, failed if no recording had anything to score; and every number as JSON.
    """
    check_targets(out, read=paths)
    systems = systems or ("portable" + SHAPE_SUFFIX, *NINE)
    for system in systems:
        if plain_name(system) not in registered():
            raise ConfigError("--systems", f"{system!r} is not one of {', '.join(registered())}")
    whole = protocol == "predict-then-learn"
    captures = [*_captures(paths, config, 1.0 if whole else learn_until)]
    if whole:
        report = predict_then_learn(captures)
        text, scored = online_lines(report), bool(report["cases"])
    else:
        report = evaluate(captures, systems, learn_until, leave_out)
        text, scored = lines(report), any(capture["scores"] for capture in report["captures"])
    for line in text:
        print_stdout(line)
    data = msgspec.json.encode(report)
    if out is not None:
        write_atomically(out, data)
        print_stdout(f"written: {out}")
    if not scored:
        print_stderr("error: there is nothing to score; give recordings of steps or requests (docs/telemetry.md)")
    return EXIT_OK if scored else EXIT_FAILED, data


def _captures(paths: Sequence[Path], config: Config, learn_until: float) -> Iterator[Capture]:
    """The configurations in the recordings; KV events are of the servers whose telemetry is in the same folder."""
    telemetry, kv = list[tuple[Path, Iterator[Timed]]](), dict[Path, list[Timed]]()
    for recordings in by_source(open_recordings(paths, print_stderr)):
        path, timed = recordings[0].path, merged(recordings)
        first = list(islice(timed, 1))
        if first and isinstance(first[0].item, KvBatch):
            kv.setdefault(path.parent, []).extend([*first, *timed])
        else:
            telemetry.append((path, chain(first, timed)))
    for path, said in telemetry:
        yield from load(path, [*said, *kv.get(path.parent, ())], config, learn_until)
