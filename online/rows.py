"""The interval equation: the one type that every quality of telemetry becomes.

A row says: *these steps, with this much work in total, took this long.*

    x @ beta = y        x = sum of features over the steps of the row      y = elapsed_us

Feature functions such as a hinge or P**2 are not additive, so a block does not carry x: it carries the
raw features of every step each row covers, and a feature set is evaluated per step and then summed per row.

    raw      (m, r)   one line per covered step, columns = the target's vocabulary; NaN = not known
    offsets  (n + 1,) row i covers raw[offsets[i]:offsets[i + 1]]
    phase    (n, k)   +1 where the row ends on a stamp of that kind, -1 where it starts on one

Request-level targets (alpha) use the same type with one line per row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from .state import StateError, Tree, fitted_array

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

STEP_UNITS = {
    "prefill_tokens": "us/token",
    "prefill_requests": "us/request",
    "decode_requests": "us/request",
    "decode_tokens": "us/token",
    "decode_context_tokens": "us/token",
    "prefill_attention": "us/token^2",
    "requests": "us/request",
    "running": "us/request",
    "waiting": "us/request",
    "preempted": "us/request",
    "finished": "us/request",
    "kv_usage_ratio": "us",
    "kv_blocks_used": "us/block",
    "offload_blocks": "us/block",
    "restore_blocks": "us/block",
    "evicted_blocks": "us/block",
    "estimated_tflop": "us/TFLOP",
    "estimated_gb": "us/GB",
}
"""Raw vocabulary of a scheduler step, and the unit of a coefficient of each."""
REQUEST_UNITS = {
    "prompt_tokens": "us/token",
    "output_tokens": "us/token",
    "waiting": "us/request",
    "running": "us/request",
    "kv_usage_ratio": "us",
    "queued_tokens": "us/token",
}
"""The same of a request, as it stood when the request was queued."""
STEP_FEATURES, REQUEST_FEATURES = tuple(STEP_UNITS), tuple(REQUEST_UNITS)

PHASES: tuple[str, ...] = ("scheduled", "completed")
"""Stamp kinds other than the reference; each is a phase column, free of sign and never published."""


class Quality(enum.IntEnum):
    """Where a row's equation comes from, richest first; also the telemetry quality of a configuration."""

    FPM = 0
    STEPS_PLUS = 1
    STEPS = 2
    SAMPLED = 3
    JOURNEYS = 4
    REQUESTS = 5
    METRICS = 6

    @property
    def label(self) -> str:
        """Name used in metrics and snapshots, e.g. ``steps+``."""
        return self.name.lower().replace("_plus", "+")


class Target(enum.StrEnum):
    """What is predicted, in microseconds: the first three of a step, the others of a request."""

    STEP_TIME = "step_time"
    SCHEDULE_TIME = "schedule_time"
    GPU_TIME = "gpu_time"
    """Of a forward pass, the GPU's share: a step time without the host's gaps."""
    API_QUEUEING = "api_queueing"
    QUEUE_WAIT = "queue_wait"
    POST_DECODE = "post_decode"
    FIRST_RESPONSE = "first_response"
    PREEMPTION_GAP = "preemption_gap"

    @property
    def vector(self) -> str:
        """``beta`` for what a step costs, ``alpha`` for what a request costs outside the steps."""
        return "beta" if self in _STEP_TARGETS else "alpha"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Names of the raw columns that rows of this target carry."""
        return STEP_FEATURES if self in _STEP_TARGETS else REQUEST_FEATURES


_STEP_TARGETS = frozenset({Target.STEP_TIME, Target.SCHEDULE_TIME, Target.GPU_TIME})


class RowOutcome(enum.StrEnum):
    """What became of a row; received = the sum over all of them."""

    LEARNED = "learned"
    NOT_FINITE = "not_finite"
    NOT_POSITIVE = "not_positive"
    OUT_OF_RANGE = "out_of_range"
    UNKNOWN_FEATURE = "unknown_feature"
    QUARANTINED = "quarantined"
    LIMIT_EXCEEDED = "limit_exceeded"
    """Of a configuration beyond ``configs_max``."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """n interval equations of one target.

    Shapes: raw (m, r) float64; offsets (n + 1,) int64, strictly increasing from 0 to m; elapsed_us (n,) float64;
    phase (n, len(PHASES)) float64; weight (n,) float64 > 0; end_ns (n,) int64 wall clock; engine (n,) int64,
    index of the emitting engine; quality (n,) int64, a :class:`Quality`.
    """

    raw: Floats
    offsets: Ints
    elapsed_us: Floats
    phase: Floats
    weight: Floats
    end_ns: Ints
    engine: Ints
    quality: Ints

    def __len__(self) -> int:
        """Number of rows n."""
        return len(self.elapsed_us)

    def __deepcopy__(self, _memo: object) -> Self:
        """Return itself: a block is immutable, so copies share it."""
        return self

    def to_state(self) -> Tree:
        """Its columns, for the state file."""
        return {name: getattr(self, name) for name in RowBlock.__slots__}

    @staticmethod
    def of_state(state: Tree, vocabulary: Sequence[str]) -> RowBlock:
        """A block of these raw features from the state file; StateError if it does not fit."""
        fresh, unknown = RowBlock.empty(vocabulary).to_state() | {"offsets": np.empty(0, np.int64)}, ("raw", "phase")
        block = RowBlock(**{name: fitted_array(state[name], each, nan=name in unknown) for name, each in fresh.items()})
        offsets, n = block.offsets, len(block)
        if any(len(column) != n for column in block.per_row()) or len(offsets) != n + 1 or offsets[0] != 0:
            raise StateError("columns of different lengths")
        if (np.diff(offsets) < 1).any() or offsets[-1] != len(block.raw):
            raise StateError("offsets do not cover the lines")
        return block

    @property
    def steps(self) -> Ints:
        """Steps covered by each row, shape (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def single(self) -> bool:
        """Whether every row covers one line."""
        return len(self.raw) == len(self.elapsed_us)

    def take(self, rows: NDArray[np.intp] | Mask) -> RowBlock:
        """The chosen rows, in the order given (indices or a mask of shape (n,))."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        steps = self.steps[index]
        offsets = np.concatenate(([0], np.cumsum(steps)))
        lines = np.repeat(self.offsets[:-1][index] - offsets[:-1], steps) + np.arange(offsets[-1])
        return RowBlock(self.raw.take(lines, axis=0), offsets, *[c.take(index, axis=0) for c in self.per_row()])

    def slice(self, start: int, stop: int) -> RowBlock:
        """Rows start..stop-1, as views."""
        offsets = self.offsets[start : stop + 1]
        raw = self.raw[offsets[0] : offsets[-1]]
        return RowBlock(raw, offsets - offsets[0], *[column[start:stop] for column in self.per_row()])

    def per_row(self) -> tuple[NDArray[Any], ...]:
        """Columns with a value per row, in the order of the fields."""
        return self.elapsed_us, self.phase, self.weight, self.end_ns, self.engine, self.quality

    @staticmethod
    def empty(vocabulary: Sequence[str]) -> RowBlock:
        """A block of no rows."""
        return RowBlock.of_lines(np.empty((0, len(vocabulary))), np.empty(0))

    @staticmethod
    def of_lines(
        raw: Floats,
        elapsed_us: Floats,
        *,
        end_ns: Ints | None = None,
        engine: int = 0,
        quality: Quality = Quality.STEPS,
    ) -> RowBlock:
        """One row per line of raw (ℓ = 1, weight 1, no phase): pairs of summaries, request targets, tests."""
        n = len(elapsed_us)
        return RowBlock(
            raw=raw,
            offsets=np.arange(n + 1),
            elapsed_us=elapsed_us,
            phase=np.zeros((n, len(PHASES))),
            weight=np.ones(n),
            end_ns=np.zeros(n, np.int64) if end_ns is None else end_ns,
            engine=np.full(n, engine, np.int64),
            quality=np.full(n, int(quality), np.int64),
        )

    @staticmethod
    def concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
        """All rows of blocks of one vocabulary, in order; needs at least one block."""
        if len(blocks) == 1:
            return blocks[0]
        raw = np.concatenate([block.raw for block in blocks])
        offsets = np.concatenate(([0], np.cumsum(np.concatenate([block.steps for block in blocks]))))
        return RowBlock(raw, offsets, *map(np.concatenate, zip(*(block.per_row() for block in blocks), strict=True)))
