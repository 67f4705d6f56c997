"""What is state of step sequences, their windows, and the KV events beside them."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from collector.config import JoinConfig
from collector.decode import STEP_DTYPE
from collector.identity import Knowledge
from collector.join import REBUILT_DTYPE, BlockRatio, StepWindow
from collector.join.kv import BATCH_DTYPE, ENTRY_DTYPE, KvSources, KvSteps, KvTimeline, Prefill, Prefills
from collector.join.requests import Chunks
from collector.join.steps import Frontier, Habits, ProcessContext, Scheduling, SchedulingVotes, StepSequence, Sums
from collector.telemetry import Counts
from online import PHASES, Quality, RowBlock

from .codec import Kind, Shape

_F8 = np.dtype("f8")
_I8 = np.dtype("i8")


class Context(NamedTuple):
    """What a restored object takes from its new process instead of from the file."""

    join: JoinConfig
    knowledge: Knowledge


def _row_block_problem(block: RowBlock) -> str | None:
    n = len(block.elapsed_us)
    lengths = {len(block.phase), len(block.weight), len(block.end_ns), len(block.engine), len(block.quality)}
    if lengths != {n} or len(block.offsets) != n + 1 or block.offsets[0] != 0:
        return "columns of different lengths"
    if (np.diff(block.offsets) < 1).any() or block.offsets[-1] != len(block.raw):
        return "offsets do not cover the lines"
    return None if np.isin(block.quality, [int(q) for q in Quality]).all() else "a quality nobody knows"


def _window_problem(window: StepWindow) -> str | None:
    if len(window.steps) != len(window.rebuilt) or not 0 <= window.size <= len(window.steps):
        return "columns of different lengths"
    return None if window.base >= 0 and window.base + window.size < 1 << 62 else "step ids out of range"


def _kv_rest(_: KvSources, context: Context) -> dict[str, object]:
    settings = context.join
    return {
        "_grace_ns": int(settings.grace_s * 1e9),
        "_window_ns": int(settings.window_s * 1e9),
        "_batches_max": settings.kv_batches_max,
        "_sources_max": settings.engines_max,
        "counts": Counts(),
    }


def settings_rest(_: object, context: Context) -> dict[str, object]:
    """Of what takes nothing but its settings from the new process."""
    return {"_settings": context.join}


BLOCK = Kind(
    RowBlock,
    {
        "raw": Shape(_F8, -1),
        "offsets": Shape(_I8),
        "elapsed_us": Shape(_F8),
        "phase": Shape(_F8, len(PHASES)),
        "weight": Shape(_F8),
        "end_ns": Shape(_I8),
        "engine": Shape(_I8),
        "quality": Shape(_I8),
    },
    check=_row_block_problem,
)

_SUMS = ("context_tokens", "blocks", "rebuilt_requests", "summary_requests", "steps", "holes")

STEP_KINDS = [
    Kind(
        StepWindow,
        {"base": int, "size": int, "steps": Shape(STEP_DTYPE), "rebuilt": Shape(REBUILT_DTYPE)},
        check=_window_problem,
    ),
    Kind(SchedulingVotes, {"decided": Scheduling, "sync": float, "asynchronous": float}),
    Kind(
        BlockRatio,
        {
            "fact_tokens": float | None,
            "event_tokens": float,
            "event_from_unix_ns": int,
            "context_tokens": float,
            "blocks": float,
        },
    ),
    Kind(Sums, dict.fromkeys(_SUMS, float)),
    Kind(Habits, {"ratio": BlockRatio, "settled": bool, "_past": Sums, "_block": Sums}),
    Kind(Chunks, {"first_step": int, "last_step": int, "scheduled_ns": int, "left": float, "done": float}),
    Kind(Frontier, {"emitted_to": int, "learned_to": int}),
    Kind(
        ProcessContext,
        {
            "habits": Habits,
            "votes": SchedulingVotes,
            "scheduling_fact": Scheduling,
            "budget_fact_tokens": float | None,
            "has_summaries": bool,
            "has_journeys": bool,
            "has_exact_context": bool,
            "has_done_stamps": bool,
            "event_unix_ns": int,
            "first_unix_ns": int,
            "longest_run_ns": int,
            "_scheduled_tokens_max": int,
            "_first_finish_unix_ns": int,
        },
        rest=settings_rest,
    ),
    Kind(
        StepSequence,
        {
            "_engine": int,
            "context": ProcessContext,
            "frontier": Frontier,
            "window": StepWindow | None,
            "kv": KvSteps,
            "_fresh_steps": tuple[int, int] | None,
            "_chunks": list[Chunks],
        },
        rest=settings_rest,
    ),
]

KV_KINDS = [
    Kind(
        KvTimeline,
        {
            "source": str,
            "rank": int,
            "block_size": int,
            "offload_block_size": int,
            "_since_unix_ns": int | None,
            "_grace_ns": int,
            "numbered": bool,
            "_batches": Shape(BATCH_DTYPE),
            "_entries": Shape(ENTRY_DTYPE),
            "_new_batches": list[tuple[int, int, int]],
            "_new_entries": list[tuple[int, int, int, int, int, int]],
            "_seqs": set[int],
            "_loads": dict[str, tuple[int, int]],
            "_horizon_ns": int,
            "oldest": tuple[int, int],
            "newest": tuple[int, int],
        },
        rest=lambda _, context: {"_batches_max": context.join.kv_batches_max},
    ),
    Kind(
        Prefill,
        {
            "first_step": int,
            "last_step": int,
            "tokens": int,
            "request_id": str,
            "resumed": bool,
            "known": bool,
            "chunk": Chunks | None,
        },
    ),
    Kind(
        Prefills,
        {
            "_pending": list[Prefill],
            "_decodes": list[tuple[int, int, int]],
            "stamps": list[tuple[int, int]],
            "hit_tokens": float,
        },
    ),
    Kind(KvSteps, {"timeline": KvTimeline | None, "prefills": Prefills}),
    Kind(
        KvSources,
        {
            "_lives": OrderedDict[tuple[str, int, str], list[KvTimeline]],
            "_unbound": list[tuple[KvTimeline, str]],
            "_bound": list[tuple[KvTimeline, StepSequence]],
        },
        rest=_kv_rest,
    ),
]
