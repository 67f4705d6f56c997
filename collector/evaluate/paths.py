"""A request's path: the steps it ran in, found by time, and what they were predicted to take.

The path of a request from SCHEDULED to FINISHED are the rows of its engine whose middle lies between the two stamps. A
row of one step counts whole (its stamps are microseconds to milliseconds from its boundaries); a row of several steps,
which bridges a hole in the telemetry, counts by the share of its time inside. In both scheduling modes this is the
inclusive step range of the request (asynchronous: from the step before its first, which it waits for, if one ran).

A request is scored when the rows of its path cover 97 to 103 % of it: what ran through a dropped warm-up step or an
unknown hole is not, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from online import Floats, Ints, RowBlock

from .captures import ScoredRequest

COVER_MIN, COVER_MAX = 0.97, 1.03


@dataclass(frozen=True, slots=True)
class RequestPath:
    """One request with the rows of its path, (k,) indices and shares, and how many of them precede the first token."""

    request: ScoredRequest
    rows: Ints
    share: Floats
    prefill: Floats


@dataclass(slots=True)
class Paths:
    """All scored requests of a capture, and how many were left out."""

    paths: list[RequestPath]
    uncovered: int


class Timeline:
    """Rows of one engine in time order."""

    def __init__(self, rows: RowBlock, engine: int) -> None:
        of_engine = np.flatnonzero(rows.engine == engine)
        self.index = of_engine[np.argsort(rows.end_ns[of_engine], kind="stable")]
        self.end = rows.end_ns[self.index].astype(np.float64)
        self.elapsed = rows.elapsed_us[self.index] * 1e3
        self.start = self.end - self.elapsed
        self.single = rows.steps[self.index] == 1
        self.middle = (self.start + self.end) / 2

    def between(self, start_ns: int, end_ns: int) -> tuple[Ints, Floats]:
        """Row numbers and the share of each inside the interval."""
        low = max(0, int(np.searchsorted(self.end, start_ns)) - 1)
        high = int(np.searchsorted(self.start, end_ns)) + 1
        here = slice(low, high)
        inside = ((self.middle[here] > start_ns) & (self.middle[here] <= end_ns)).astype(np.float64)
        overlap = np.minimum(self.end[here], end_ns) - np.maximum(self.start[here], start_ns)
        share = np.where(self.single[here], inside, np.clip(overlap / self.elapsed[here], 0.0, 1.0))
        used = np.flatnonzero(share > 0.0)
        return self.index[here][used], share[used]


def paths_of(rows: RowBlock, requests: Sequence[ScoredRequest]) -> Paths:
    """The path of every request that its rows cover."""
    lines: dict[int, Timeline] = {}
    paths, uncovered = [], 0
    for request in requests:
        line = lines.setdefault(request.engine, Timeline(rows, request.engine))
        index, share = line.between(request.scheduled_ns, request.finished_ns)
        covered = float((rows.elapsed_us[index] * share).sum()) * 1e3 / (request.finished_ns - request.scheduled_ns)
        if not COVER_MIN <= covered <= COVER_MAX:
            uncovered += 1
            continue
        first, part = line.between(request.scheduled_ns, request.first_token_ns)
        prefill = np.zeros(len(index))
        prefill[np.searchsorted(index, first)] = part
        paths.append(RequestPath(request, index, share, prefill))
    return Paths(paths, uncovered)


def predicted(paths: Sequence[RequestPath], prediction_us: Floats) -> tuple[Floats, Floats]:
    """Sum of the predictions along each path and up to its first token, each (n,) us; NaN where one is not known."""
    whole = np.array([float(prediction_us[p.rows] @ p.share) for p in paths])
    prefill = np.array([float(prediction_us[p.rows] @ p.prefill) for p in paths])
    return whole, prefill
