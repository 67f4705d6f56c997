"""Charts: legible, short and true numbers, and never outside of their frame."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.charts import (
    ErrorPoint,
    Mark,
    ValuePoint,
    age,
    coefficient,
    coefficient_course,
    duration,
    error_course,
    meter,
    nice_limit,
    percent,
    residuals,
    scatter,
    shares,
    significant,
    whisker,
)
from exporters.charts.svg import decade_ticks, round_ticks
from exporters.charts.text import compact, round_duration


@pytest.mark.parametrize(
    ("value_us", "expected"),
    [(0, "0 µs"), (0.07, "70.0 ns"), (1, "1.00 µs"), (16_800, "16.8 ms"), (2_500_000, "2.50 s"), (-300, "-300 µs")],
)
def test_durations_are_read_in_the_unit_that_fits(value_us, expected):
    assert duration(value_us) == expected


def test_numbers_are_short_and_true():
    assert coefficient(1.9, "us/us") == "1.90 ×"
    assert coefficient(580, "us/token") == "580 µs/token"
    assert coefficient(3, "blocks") == "3.00 blocks"
    assert [percent(r) for r in (0, 0.013, 0.0996, 0.5, 12)] == ["0 %", "1.3 %", "10 %", "50 %", "1,200 %"]
    assert [age(s) for s in (-1, 3, 600, 9000, 200_000)] == ["0 s", "3 s", "10 min", "2 h", "2 d"]
    assert significant(float("nan")) == "unknown"
    assert nice_limit(0.21) == 0.3
    assert nice_limit(99) == 5.0
    assert [round_duration(us) for us in (20_000, 500, 100_000, 1_500_000)] == ["20 ms", "500 µs", "100 ms", "1.5 s"]
    assert [compact(n) for n in (0, 512, 2000, 1.5e6, 3e9)] == ["0", "512", "2k", "1.5M", "3G"]


def test_ticks_are_round_and_few():
    assert [value for value, _ in round_ticks(0.0, 17.0, str)] == [0.0, 5.0, 10.0, 15.0]
    assert [value for value, _ in round_ticks(115.5, 123.8, str)] == [116.0, 118.0, 120.0, 122.0]
    assert [value for value, _ in decade_ticks(0.9, 11.0, str)] == [1.0, 2.0, 5.0, 10.0]
    assert [value for value, _ in decade_ticks(1.0, 1e6, str)] == [1.0, 50.0, 2000.0, 1e5]
    assert round_ticks(3.0, 3.0, str) == [(3.0, "3.0")]


def test_what_is_seen_is_said_too():
    assert 'aria-label="Predicted against observed time of 2 steps: 50% within 10 %"' in scatter([10, 20], [10, 30])
    course = error_course([ErrorPoint(0, 0.2, 0.4), ErrorPoint(9, 0.1, 0.3)], [Mark(4, "×1.20")], ("", "now"))
    assert "last median 10 %, last 90th percentile 30 %; ×1.20" in course
    assert "from 20.0 ms to 10.0 ms" in coefficient_course(
        "every step", "us", [ValuePoint(0, 2e4, 1e3), ValuePoint(9, 1e4, None)], []
    )
    assert "a 25 %, b 75 %" in shares([("a", 1.0), ("b", 3.0)])


def test_a_form_that_fails_at_large_batches_is_seen_over_the_batch():
    batch = [float(n) for n in range(1, 65)]
    label = re.search('aria-label="([^"]*)"', residuals("requests", batch, [n * n for n in batch], batch))[1]
    assert re.search("furthest off at (59|6.)", label), label


NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
TIMES = st.floats(min_value=0.0, max_value=1e12)


def frame_of(text):
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups())
    across = [float(n) for n in re.findall(r' (?:x[12]?|cx)="([^"]*)"', text)]
    down = [float(n) for n in re.findall(r' (?:y[12]?|cy)="([^"]*)"', text)]
    for points in re.findall(r'points="([^"]*)"', text):
        across += [float(pair.split(",")[0]) for pair in points.split()]
        down += [float(pair.split(",")[1]) for pair in points.split()]
    for x, y in re.findall(r"M(-?\d+) (-?\d+)h0", text):
        across.append(float(x))
        down.append(float(y))
    assert all(0 <= x <= width for x in across)
    assert all(0 <= y <= height for y in down)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(NUMBERS, TIMES, TIMES), min_size=1, max_size=12), st.lists(NUMBERS, max_size=4))
def test_charts_stay_inside_their_frame_whatever_the_numbers(rows, times):
    values, observed, predicted = zip(*rows, strict=True)
    marks = [Mark(at, "restart") for at in times]
    at = sorted(values)
    errors = [ErrorPoint(t, *pair) for t, *pair in zip(at, observed, predicted, strict=True)]
    points = [ValuePoint(t, v, s) for t, v, s in zip(at, values, observed, strict=True)]
    drawn = [
        scatter(observed, predicted),
        residuals("x", values, observed, predicted),
        error_course(errors, marks, ("a", "b")),
        coefficient_course("x", "us", points, marks),
        shares([("x", t) for t in observed]),
        whisker(observed[0], 0.1),
        meter(values[0], values[-1], "x"),
    ]
    for text in drawn:
        if "<svg" in text:
            frame_of(text)
