"""The report for a terminal: one table per capture, one of what transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .leave_out import FIRST_ROWS, Transfer
from .page_windows import WINDOW_S, PageReport
from .protocol import CaptureReport, Report
from .request_baselines import RequestReport, RequestScore

COLUMNS: tuple[tuple[str, str], ...] = (
    ("step_mape", "step %"),
    ("step_median", "median"),
    ("step_p90", "p90"),
    ("pearson_r", "r"),
    ("prequential_mape", "preq %"),
    ("gpu_time_mape", "GPU time"),
    ("e2e", "E2E"),
    ("e2e_full", "E2E full"),
    ("ttft", "TTFT"),
    ("itl", "ITL"),
    ("p99", "p99"),
    ("coverage", "cover %"),
    ("queue_wait_mdape", "wait %"),
    ("api_queueing_mdape", "API %"),
)
"""Field of a score, and its heading; ratios are shown in per cent, except r."""


SERVED_HEADINGS = ("TTFT median", "p90", "TPOT median", "p90")


def lines(report: Report) -> Iterator[str]:
    """The report as text, line by line."""
    for capture in report.captures:
        yield from _capture(capture)
    for pages in report.pages:
        yield from _pages(pages)
    if report.transfers:
        yield ""
        yield f"Leave one {report.left_out} out: mean step error in %, nothing of its own / after its first rows (cold)"
        for name, transfers in report.transfers.items():
            yield from _transfers(name, transfers)
    if report.inversions:
        yield ""
        ranked = "  ".join(f"{system} {'-' if n is None else n}" for system, n in report.inversions.items())
        yield f"Workload pairs ranked the wrong way round by their 99th percentile: {ranked}"


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
    if not capture.scores:
        yield "  nothing to score"
        return
    yield from _systems(capture)
    if capture.served is not None:
        yield from _served(capture.served)


def _systems(capture: CaptureReport) -> Iterator[str]:
    headings = ["system", "columns", *(heading for _, heading in COLUMNS), "rows to 10 %"]
    table = [headings]
    for score in capture.scores:
        cells = [cell(getattr(score, field), field) for field, _ in COLUMNS]
        goal = "-" if score.rows_to_goal is None else str(score.rows_to_goal)
        table.append([score.system, f"{score.identifiable}/{score.columns}", *cells, goal])
    yield from aligned(table)


def _served(report: RequestReport) -> Iterator[str]:
    yield f"  single requests: learned from {report.learned}, judged on the last {report.judged}, relative error in %"
    if report.scores:
        yield from aligned(
            [["model", *SERVED_HEADINGS], *([each.model, *served_cells(each)] for each in report.scores)]
        )
    if report.note:
        yield f"  {report.note}"


def served_cells(score: RequestScore) -> list[str]:
    """The columns of ``SERVED_HEADINGS``."""
    return [cell(value) for value in (score.ttft_median, score.ttft_p90, score.tpot_median, score.tpot_p90)]


def _pages(report: PageReport) -> Iterator[str]:
    yield ""
    yield (
        f"{report.name}  {report.pages} pages, learned from {report.learned_rows} rows, scored on {report.windows} "
        f"windows of {WINDOW_S:g} s: error of the mean inter-token latency in %"
    )
    if not report.scores:
        yield "  nothing to score"
        return
    rows = [[score.model, cell(score.mean), cell(score.median), score.note] for score in report.scores]
    yield from aligned([["model", "mean", "median", ""], *rows])


def _transfers(name: str, transfers: Sequence[Transfer]) -> Iterator[str]:
    yield f"  {name}"
    table = [
        [
            "system",
            "variant",
            "donors",
            "zero-shot",
            *(f"@{n}" for n in FIRST_ROWS),
            *(f"cold @{n}" for n in FIRST_ROWS),
        ]
    ]
    for t in transfers:
        after = [cell(t.after.get(str(n))) for n in FIRST_ROWS]
        cold = [cell(t.cold.get(str(n))) for n in FIRST_ROWS]
        table.append([t.system, t.variant, str(t.donors), cell(t.zero_shot), *after, *cold])
    yield from aligned(table)


def cell(value: float | None, field: str = "") -> str:
    """A ratio in per cent; a correlation as it is; a dash for what cannot be said."""
    if value is None:
        return "-"
    if field == "pearson_r":
        return f"{value:.3f}"
    return f"{100 * value:.1f}"


def aligned(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, the first two columns to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = [
            text.ljust(width) if i < 1 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()
