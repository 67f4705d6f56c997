"""The report as one self-contained HTML page: no script, no font, no address outside."""

from __future__ import annotations

from collections.abc import Iterator

from exporters.charts import (
    CHART_STYLE,
    Coefficient,
    ErrorPoint,
    Mark,
    error_course,
    escape,
    histogram,
    intervals,
    scatter,
    unit_text,
)

from .leave_out import FIRST_ROWS
from .page_windows import WINDOW_S, PageReport
from .protocol import HISTOGRAM_REACH, CaptureReport, Picture, Report
from .request_baselines import RequestReport
from .tables import COLUMNS, SERVED_HEADINGS, cell, served_cells

_STYLE = """
:root { font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; color:var(--ink); background:var(--bg) }
body { margin:0 auto; max-width:1320px; padding:28px 20px 48px }
h1 { font-size:27px; margin:0 0 6px; letter-spacing:-.015em }
h2 { font-size:19px; margin:0 }
h3 { font-size:15px; margin:18px 0 6px }
p { margin:4px 0 }
.quiet { color:var(--soft) }
section { background:var(--card); border:1px solid var(--line); border-radius:14px; padding:20px 24px; margin:20px 0 }
.scroll { overflow-x:auto }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; margin:10px 0; min-width:720px }
th,td { padding:4px 7px; text-align:right; border-bottom:1px solid var(--line); white-space:nowrap }
th { color:var(--soft); font-weight:550 }
th:first-child,td:first-child { text-align:left }
td.best { font-weight:700; color:var(--accent) }
details { border-top:1px solid var(--line); padding:8px 0 }
summary { cursor:pointer; font-weight:600 }
.charts { margin:10px 0 }
figure.wide { grid-column:1/-1; max-width:760px }
""".strip()

_NOT_AN_ERROR = frozenset({"pearson_r", "p99", "coverage"})


def page(report: Report) -> str:
    """Render the report as one HTML page."""
    body = "".join(_sections(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<title>tracefit: systems side by side</title><style>{CHART_STYLE}{_STYLE}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    yield "<header><h1>Modelling systems, side by side</h1>"
    yield (
        f'<p class="quiet">tracefit {_text(report.tracefit_version)}. Learned from what was delivered in the first '
        f"{100 * report.learn_until:g} % of each recording, scored frozen on the rest. Errors in per cent; the best of "
        "a column is bold. E2E is the error of the mean from SCHEDULED to FINISHED; <em>full</em>, from arrival to "
        "departure.</p></header>"
    )
    yield from _summary(report)
    for capture in report.captures:
        yield from _capture(capture)
    for pages in report.pages:
        yield from _pages(pages)
    yield from _transfers(report)


def _summary(report: Report) -> Iterator[str]:
    systems = list(dict.fromkeys(score.system for capture in report.captures for score in capture.scores))
    if not systems:
        return
    yield "<section><h2>Mean step error of each system</h2>" + _open_table()
    yield "<tr><th>system</th>" + "".join(f"<th>{_text(c.name)}</th>" for c in report.captures)
    yield "<th>pairs misranked by p99</th></tr>"
    errors = [{score.system: score.step_mape for score in capture.scores} for capture in report.captures]
    best = [min((v for v in column.values() if v is not None), default=None) for column in errors]
    for system in systems:
        cells = "".join(_td(column.get(system), lowest) for column, lowest in zip(errors, best, strict=True))
        misranked = report.inversions.get(system)
        yield f"<tr><td>{_text(system)}</td>{cells}<td>{'-' if misranked is None else misranked}</td></tr>"
    yield "</table></div></section>"


def _capture(capture: CaptureReport) -> Iterator[str]:
    kind = "interval rows" if capture.interval_rows else "steps"
    yield f"<section><h2>{_text(capture.name)}</h2>"
    yield (
        f'<p class="quiet">Telemetry {_text(capture.telemetry)}; learned from {capture.learned_rows} rows; scored on '
        f"{capture.scored_rows} {kind} and {capture.scored_requests} requests "
        f"({capture.uncovered_requests} left out: their path is not covered by rows).</p>"
    )
    known = ", ".join(f"{k}={v}" for k, v in capture.facts.items() if k in _SHOWN)
    yield f'<p class="quiet">{_text(known)}</p>'
    if capture.cannot_derive:
        yield f"<p>Systems that need a sheet are not here. Missing: {_text(', '.join(capture.cannot_derive))}.</p>"
    if not capture.scores:
        yield "<p>Nothing to score.</p></section>"
        return
    yield from _score_table(capture)
    if capture.served is not None:
        yield from _served(capture.served)
    for number, (system, picture) in enumerate(capture.pictures.items()):
        opened = " open" if number == 0 else ""
        yield f"<details{opened}><summary>{_text(system)}</summary>"
        yield from charts(picture)
        yield "</details>"
    yield "</section>"


def charts(picture: Picture) -> Iterator[str]:
    """Of one system on one recording."""
    points = [
        ErrorPoint(*point) for point in zip(picture.course_s, picture.course_median, picture.course_p90, strict=True)
    ]
    end = f"{points[-1].at_s:.0f} s" if points else ""
    course = error_course(points, [Mark(at_s, "change of speed") for at_s in picture.drifts_s], ("0 s", end))
    figures = (
        (
            "Predicted against observed",
            "scored steps, predicted upwards",
            scatter(picture.observed_us, picture.predicted_us),
        ),
        ("Error of predictions", "predict, then learn; line: median, area: 9 of 10", course),
        ("Residuals", "steps by observed ÷ predicted − 1", histogram(picture.histogram, HISTOGRAM_REACH)),
    )
    yield '<div class="charts">'
    for caption, note, chart in figures:
        yield f"<figure><figcaption>{caption}<span>{note}</span></figcaption>{chart}</figure>"
    sure = intervals(
        [
            Coefficient(c.name, c.coefficient, c.stderr, f"{c.coefficient:.4g} {unit_text(c.unit)} {c.status}")
            for c in picture.coefficients
        ]
    )
    yield f'<figure class="wide"><figcaption>Coefficients, 95 % intervals</figcaption>{sure}</figure></div>'


_SHOWN = ("model", "model_type", "gpu", "tensor_parallel_size", "dtype", "max_num_seqs", "max_num_batched_tokens")


def _score_table(capture: CaptureReport) -> Iterator[str]:
    yield _open_table() + "<tr><th>system</th><th>columns</th>"
    yield "".join(f"<th>{_text(heading)}</th>" for _, heading in COLUMNS) + "<th>rows to 10 %</th></tr>"
    best = {
        field: min((v for s in capture.scores if (v := getattr(s, field)) is not None), default=None)
        for field, _ in COLUMNS
        if field not in _NOT_AN_ERROR
    }
    for score in capture.scores:
        goal = "-" if score.rows_to_goal is None else score.rows_to_goal
        cells = "".join(_td(getattr(score, field), best.get(field), field) for field, _ in COLUMNS)
        columns = f"{score.identifiable}/{score.columns}"
        yield f"<tr><td>{_text(score.system)}</td><td>{columns}</td>{cells}<td>{goal}</td></tr>"
    yield "</table></div>"
    if capture.quantile_coverage is not None:
        yield f'<p class="quiet">rece\'s own quantiles cover {100 * capture.quantile_coverage:.0f} % (target 80 %).</p>'


def _served(report: RequestReport) -> Iterator[str]:
    told = f"Learned from {report.learned}, judged on the last {report.judged}. {report.note}"
    yield f'<h3>Single requests</h3><p class="quiet">{_text(told)}</p>'
    if report.scores:
        yield _open_table() + "<tr><th>model</th>" + "".join(f"<th>{heading}</th>" for heading in SERVED_HEADINGS)
        for score in report.scores:
            cells = "".join(f"<td>{each}</td>" for each in served_cells(score))
            yield f"</tr><tr><td>{_text(score.model)}</td>{cells}"
        yield "</tr></table></div>"


def _pages(report: PageReport) -> Iterator[str]:
    yield f"<section><h2>{_text(report.name)}</h2>"
    yield (
        f'<p class="quiet">{report.pages} pages of counters; learned from {report.learned_rows} rows; scored on '
        f"{report.windows} windows of {WINDOW_S:g} s by their mean inter-token latency.</p>"
    )
    yield _open_table() + "<tr><th>model</th><th>mean</th><th>median</th><th></th></tr>"
    best = min((score.mean for score in report.scores if score.mean is not None), default=None)
    for score in report.scores:
        cells = _td(score.mean, best) + _td(score.median)
        yield f"<tr><td>{_text(score.model)}</td>{cells}<td>{_text(score.note)}</td></tr>"
    yield "</table></div></section>"


def _transfers(report: Report) -> Iterator[str]:
    if not report.transfers:
        return
    yield f"<section><h2>Leave one {_text(report.left_out)} out</h2>"
    yield '<p class="quiet">Mean step error of the recording left out: with nothing of its own, after its first rows, '
    yield "and after as many rows without donors.</p>"
    heads = "".join(f"<th>{kind}@{n}</th>" for kind in ("", "cold ") for n in FIRST_ROWS)
    for name, transfers in report.transfers.items():
        yield f"<h3>{_text(name)}</h3>" + _open_table()
        yield f"<tr><th>system</th><th>variant</th><th>donors</th><th>zero-shot</th>{heads}</tr>"
        for t in transfers:
            numbers = [t.zero_shot, *(kind.get(str(n)) for kind in (t.after, t.cold) for n in FIRST_ROWS)]
            cells = "".join(_td(value) for value in numbers)
            yield f"<tr><td>{_text(t.system)}</td><td>{_text(t.variant)}</td><td>{t.donors}</td>{cells}</tr>"
        yield "</table></div>"
    yield "</section>"


def _open_table() -> str:
    return '<div class="scroll"><table>'


def _td(value: float | None, best: float | None = None, field: str = "") -> str:
    css = ' class="best"' if value is not None and value == best else ""
    return f"<td{css}>{cell(value, field)}</td>"


def _text(text: object) -> str:
    return escape(text)
