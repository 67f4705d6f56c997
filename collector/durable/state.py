"""The state of the whole pipeline: everything a restart needs, so that stop and restart is no restart.

Guarantee: a pipeline restored from the state of another one gives bitwise the same rows and coefficients for the same
further exports (tests/property/test_sidecar_state.py). Inside: the span ids remembered, every engine process's window,
the requests and API spans that wait, rows held for their turn, the binding of KV publishers, and the learners with
their partial blocks; beside them the number of the last journal entry that is part of all that.

Decoded layouts (``collector/decode/columnar.py``) are a cache and stay out. Bounds and settings are the new process's:
what is held beyond a bound that has become smaller goes as it would have gone anyway.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from collector.decode import ApiSpan, CoreSpan, RequestSpan
from collector.identity import Fact, Facts, FactSource
from collector.join import (
    ApiProcess,
    ApiSpans,
    BlockRatio,
    EmitterIds,
    Engine,
    EngineProcess,
    Joiner,
    PendingRequest,
    Release,
    SpanWindow,
)
from collector.join.kv import KvSources
from collector.join.requests import HANDOFFS_MAX, ApiQueueing, HeldRequest, RequestSequence
from collector.join.steps import StepSequence, WarmUp
from collector.telemetry import Counts
from online import RowBlock, Target

from .codec import Bounded, Codec, Kind
from .state_steps import BLOCK, KV_KINDS, STEP_KINDS, Context

_Key = tuple[str, str]


def _emitter_rest(emitter: EmitterIds, _: Context) -> dict[str, object]:
    return {"ids": {span_id for _, span_id in emitter.by_age}}


def _engine_rest(_: Engine, context: Context) -> dict[str, object]:
    remembered_ns = int((context.join.window_s - context.join.grace_s) * 1e9)
    return {"_settings": context.join, "_remembered_ns": remembered_ns, "_counts": Counts()}


def _joiner_rest(_: Joiner, context: Context) -> dict[str, object]:
    # every configuration is described again: the bank saves facts of what has learned only
    fresh: dict[str, object] = {"_described": {}, "_succeeded": [], "_counts": Counts()}
    return {"_settings": context.join, "knowledge": context.knowledge, **fresh}


_SPANS = Codec(
    [
        Kind(SpanWindow, {"_emitters": dict[str, EmitterIds]}),
        Kind(
            EmitterIds,
            {"by_age": list[tuple[int, bytes]], "newest_ns": int, "horizon_ns": int},
            rest=_emitter_rest,
        ),
    ]
)

_REQUEST_KINDS = [
    Kind(
        PendingRequest,
        {
            "span": CoreSpan,
            "last_step": int,
            "queued_unix_ns": int,
            "start_unix_ns": int,
            "end_unix_ns": int,
            "api": ApiSpan | None,
        },
    ),
    Kind(ApiQueueing, {"requests": int, "wait_us": float, "handoffs_us": Bounded(float, HANDOFFS_MAX)}),
    Kind(
        HeldRequest,
        {
            "first_s": float,
            "last_s": float,
            "prompt_tokens": float,
            "output_tokens": int,
            "end_unix_ns": int,
            "span": RequestSpan,
        },
    ),
    Kind(
        RequestSequence,
        {
            "_engine": int,
            "_epoch_unix_ns": int,
            "_held": list[HeldRequest],
            "_pending": list[tuple[int, bytes, HeldRequest]],
            "_emitted_until_unix_ns": int,
            "event_unix_ns": int,
        },
        rest=lambda _, context: {"_settings": context.join, "counts": Counts()},
    ),
]

_ENGINE_KINDS = [
    Kind(
        Facts,
        {
            "_facts": dict[str, tuple[FactSource, Fact]],
            "_claims": dict[tuple[str, FactSource], Fact],
            "conflicts": int,
            "version": int,
        },
    ),
    Kind(
        WarmUp,
        {
            "rows_min": int,
            "over": bool,
            "dropped": int,
            "spans_unix_ns": list[tuple[int, int]],
            "_held": list[RowBlock],
        },
    ),
    Kind(EngineProcess, {"sequence": StepSequence, "warm_up": WarmUp, "requests": list[PendingRequest]}),
    Kind(
        Engine,
        {
            "instance": str,
            "recording": str,
            "number": int,
            "facts": Facts,
            "ratio": BlockRatio,
            "api_queueing": ApiQueueing,
            "_processes": list[EngineProcess],
        },
        rest=_engine_rest,
    ),
    Kind(
        ApiProcess,
        {
            "instance": str,
            "recording": str,
            "facts": Facts,
            "requests": RequestSequence,
            "api_queueing": ApiQueueing,
        },
    ),
    Kind(Release, {"_held": dict[Target, dict[str, deque[RowBlock]]]}),
    Kind(
        ApiSpans,
        {
            "_spans": OrderedDict[bytes, ApiSpan],
            "_waiting": OrderedDict[bytes, list[tuple[Engine, PendingRequest]]],
            "_waiting_count": int,
        },
        rest=lambda _, context: {"_requests_max": context.join.requests_max},
    ),
    Kind(
        Joiner,
        {
            "_engines": OrderedDict[_Key, Engine],
            "_api_processes": OrderedDict[_Key, ApiProcess],
            "_aliases": dict[_Key, Engine],
            "_emitter_count": int,
            "_api_spans": ApiSpans,
            "_releases": dict[str, Release],
            "_config_ids": dict[_Key, str],
            "kv": KvSources,
        },
        rest=_joiner_rest,
    ),
]

_JOIN = Codec([BLOCK, *STEP_KINDS, *KV_KINDS, *_REQUEST_KINDS, *_ENGINE_KINDS])


def dump_spans(spans: SpanWindow) -> dict[str, Any]:
    """The span ids remembered."""
    return _SPANS.dump(spans)


def load_spans(data: dict[str, Any]) -> SpanWindow:
    """They again; the bounds are those of the window that takes them over."""
    loaded: SpanWindow = _SPANS.load(data, SpanWindow, None)
    return loaded


def dump_joiner(joiner: Joiner) -> dict[str, Any]:
    """Everything held between decoding and learning."""
    return _JOIN.dump(joiner)


def load_joiner(data: dict[str, Any], context: Context) -> Joiner:
    """It again."""
    loaded: Joiner = _JOIN.load(data, Joiner, context)
    return loaded
