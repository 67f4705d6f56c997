"""Charts: legible, short and true numbers, and never outside of their frame."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.charts import (
    ErrorPoint,
    Mark,
    ValuePoint,
    coefficient_course,
    error_course,
    histogram,
    meter,
    residuals,
    scatter,
    shares,
    whisker,
)


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
        histogram([int(t) for t in observed], 0.2),
        shares([("x", t) for t in observed]),
        whisker(observed[0], 0.1),
        meter(values[0], values[-1], "x"),
    ]
    for text in drawn:
        if "<svg" in text:
            frame_of(text)
