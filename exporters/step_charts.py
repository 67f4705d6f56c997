"""Pictures of a step: where its time goes, predicted against observed, where that is off, and the last day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from exporters.advice import OTLP_PORT
from exporters.charts import (
    ErrorPoint,
    Mark,
    ValuePoint,
    coefficient_course,
    error_course,
    residuals,
    scatter,
    shares,
)
from exporters.wording import FEATURE_NAMES, age, coefficient, duration, escape, percent, significant
from online import ChangeKind, ConfigSnapshot, CoursePoint, HistoryView, ModelSnapshot, TargetSnapshot

MAX_PARTS = 5
_OVER = (
    ("requests", "batch", "requests in the batch"),
    ("decode_context_tokens", "context", "tokens of decode context"),
    ("prefill_tokens", "prefill", "prefill tokens"),
)
_PLURALS = {
    FEATURE_NAMES["prefill_tokens"]: "prefill tokens",
    FEATURE_NAMES["decode_context_tokens"]: "tokens of decode context",
    FEATURE_NAMES["requests"]: "requests in the batch",
}
_WORDS = {
    ChangeKind.RESTART: "restart",
    ChangeKind.CONFIGURATION: "configuration",
    ChangeKind.PREFILL_SPEED: "prefill",
}
_REST = "beyond the coefficients: batch shape, stalls"
_COURSE_NOTE = (
    '<p class="quiet">Area: 95 % interval. Dashed: a change of speed (new ÷ old time; <i>prefill</i>: of steps with '
    "prefill alone), a restart of an engine or of the sidecar, another configuration.</p>"
)


class Seen(NamedTuple):
    """A configuration, and what is remembered of its steps.

    ``started_unix_nano``: of this process. ``otlp_port``: where it takes OTLP over gRPC, for advice.
    """

    config: ConfigSnapshot
    history: HistoryView | None
    started_unix_nano: int
    otlp_port: int = OTLP_PORT


def step_shares(target: TargetSnapshot, model: ModelSnapshot) -> str:
    """Where the time of a typical step goes: coefficients times the mean of their features over the remembered rows."""
    means = {feature.name: 1.0 if feature.name == "intercept" else feature.mean for feature in model.features}
    if any(mean is None for mean in means.values()) or len(means) < 2:  # noqa: PLR2004 - parts of a whole
        return ""
    parts = [
        (FEATURE_NAMES.get(each.name, each.name), each.coefficient * (means[each.name] or 0.0), means[each.name] or 0.0)
        for each in model.features
    ]
    shown = sorted(parts[:MAX_PARTS], key=lambda part: -part[1])
    whole = sum(size for _, size, _ in shown)
    if target.mean_us is not None and target.mean_us > whole:
        shown.append((_REST, target.mean_us - whole, 0.0))
        whole = target.mean_us
    if not whole > 0:
        return ""
    listed = "".join(
        f'<li><span class="key series-{number}"></span><span class="part-name">{escape(_named(name, mean))}</span> '
        f"<b>{percent(size / whole)}</b> <span>{duration(size)}</span></li>"
        for number, (name, size, mean) in enumerate(shown)
    )
    return (
        f'<figure class="shares"><figcaption>Where a typical step’s {duration(whole)} go'
        "<span>coefficients × today’s mean load</span></figcaption>"
        f'{shares([(name, size) for name, size, _ in shown])}<ul class="legend">{listed}</ul></figure>'
    )


def _named(name: str, mean: float) -> str:
    if not mean or name == FEATURE_NAMES["intercept"]:
        return name
    return f"{significant(mean)} {_PLURALS.get(name, f'× {name}')}"


def step_charts(model: ModelSnapshot, seen: Seen) -> str:
    """Charts of rows, errors and coefficients; what is not there yet is left out."""
    figures = [*_row_figures(seen.history), *_error_figure(seen)]
    charts = f'<div class="charts">{"".join(figures)}</div>' if figures else ""
    courses = _course_figures(model, seen)
    if courses:
        charts += f"<h4>Coefficients over the last 24 hours</h4>{_COURSE_NOTE}"
        charts += f'<div class="charts">{"".join(courses)}</div>'
    return charts


def _figure(caption: str, chart: str, note: str = "") -> str:
    return f"<figure><figcaption>{caption}<span>{note}</span></figcaption>{chart}</figure>"


def _row_figures(history: HistoryView | None) -> list[str]:
    if history is None:
        return []
    rows = history.rows()
    if not rows.observed_us:
        return []
    note = f"last {len(rows.observed_us)} rows, before learning; predicted upwards"
    figures = [_figure("Predicted against observed", scatter(rows.observed_us, rows.predicted_us), note)]
    for name, word, axis in _OVER:
        values = rows.features.get(name)
        if values:
            chart = residuals(axis, values, rows.observed_us, rows.predicted_us)
            note = "observed ÷ predicted − 1; line: median"
            figures.append(_figure(f"How far off, over {word}", chart, note))
    return figures


def _marks(seen: Seen) -> list[Mark]:
    marks = [] if seen.history is None else seen.history.changes
    words = [
        Mark(
            each.at_ns / 1e9, f"{_WORDS.get(each.kind, '')} {'' if each.gain is None else f'×{each.gain:.2f}'}".strip()
        )
        for each in marks
    ]
    return sorted([*words, Mark(seen.started_unix_nano / 1e9, "sidecar")])


def _error_figure(seen: Seen) -> list[str]:
    course: Sequence[CoursePoint] = [] if seen.history is None else seen.history.course()
    points = [
        ErrorPoint(each.at_ns / 1e9, each.median_ape, each.p90_ape)
        for each in course
        if each.median_ape is not None and each.p90_ape is not None
    ]
    if not course:
        return []
    ago = f"{age(points[-1].at_s - points[0].at_s)} ago" if points else ""
    chart = error_course(points, _marks(seen), (ago, "now"))
    return [_figure("Error of predictions", chart, "before learning; line: median, area: 9 of 10")]


def _course_figures(model: ModelSnapshot, seen: Seen) -> list[str]:
    history = seen.history
    course = [] if history is None else history.course()
    if history is None or len(course) < 2:  # noqa: PLR2004 - a line has two ends
        return []
    marks = _marks(seen)
    known = {name: place for place, name in enumerate(history.features)}
    figures = []
    for feature in model.features:
        place = known.get(feature.name)
        if place is None:
            continue
        points = [
            ValuePoint(each.at_ns / 1e9, value, each.stderr[place])
            for each in course
            if (value := each.coefficient[place]) is not None
        ]
        name = FEATURE_NAMES.get(feature.name, feature.name)
        now = f"now {coefficient(feature.coefficient, feature.unit)}"
        figures.append(_figure(escape(name), coefficient_course(name, feature.unit, points, marks), escape(now)))
    return figures
