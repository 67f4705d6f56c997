r"""The state of the whole pipeline: everything a restart needs, so that stop and restart is no restart.

    b"tracefit.sidecar/1\n"  |  SHA-256 of the rest (32 bytes)  |  MessagePack map

Guarantees: a pipeline restored from the state of another one gives bitwise the same rows and coefficients for the same
further exports (tests/property/test_sidecar_state.py); a file cut at any byte or with any bit flipped is refused as a
whole; nothing is executed that the bytes name. Inside: the span ids remembered, every engine process's window, the
requests and API spans that wait, rows held for their turn, the binding of KV publishers, and the learners with their
partial blocks; beside them the number of the last journal entry that is part of all that.

Decoded layouts (``collector/decode/columnar.py``) are a cache and stay out. Bounds and settings are the new process's:
what is held beyond a bound that has become smaller goes as it would have gone anyway.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from online.rows import PHASES, Quality, RowBlock, Target
from online.state import StateError

from .configs import Fact, Facts, FactSource
from .decode.kv_records import KvTally
from .decode.records import STEP_DTYPE, ApiSpan, CoreSpan, RequestSpan
from .join.api_process import ApiProcess
from .join.api_queueing import HANDOFFS_MAX, ApiQueueing
from .join.dedupe import Emitter, SpanWindow
from .join.engine import Engine, PendingRequest, Process
from .join.features import BlockRatio
from .join.habits import Habits, Sums
from .join.joiner import Joiner
from .join.journeys import Chunks
from .join.kv import KvSources
from .join.kv_prefix import Prefill, Prefills
from .join.kv_steps import KvSteps
from .join.kv_timeline import BATCH_DTYPE, ENTRY_DTYPE, KvTimeline
from .join.occupancy import Request, RequestSequence
from .join.release import Release
from .join.scheduling import Scheduling, SchedulingVotes
from .join.sequence import Sequence
from .join.settings import JoinSettings
from .join.warm_up import WarmUp
from .join.window import REBUILT_DTYPE, StepWindow
from .knowledge import Knowledge
from .state_codec import Bounded, Codec, Kind, Shape

MAGIC = b"tracefit.sidecar/1\n"
VERSION = 1
_DIGEST_BYTES = 32
_HEAD_BYTES = len(MAGIC) + _DIGEST_BYTES

_F8 = np.dtype("f8")
_I8 = np.dtype("i8")
_Key = tuple[str, str]


class Context(NamedTuple):
    """What a restored object takes from its new process instead of from the file."""

    join: JoinSettings
    knowledge: Knowledge


class StateImage(msgspec.Struct, frozen=True):
    """A state as taken: ``seq`` is the last journal entry in it, ``generation`` the last one published."""

    seq: int
    generation: int
    spans: dict[str, Any]
    joiner: dict[str, Any]
    described: dict[str, tuple[tuple[str, int], ...]]
    bank: bytes
    version: int = VERSION


def encode(image: StateImage) -> bytes:
    """MessagePack of an image, without head: shares nothing with the pipeline any more."""
    return msgspec.msgpack.encode(image, enc_hook=_plain_number)


def sealed(body: bytes) -> bytes:
    """The file: head, checksum, body."""
    return b"".join((MAGIC, hashlib.sha256(body).digest(), body))


def decode(data: bytes) -> StateImage:
    """The image in a file.

    Raises:
        StateError: truncated, corrupt, not a state file, or of another version.
    """
    if not data.startswith(MAGIC):
        raise StateError(f"not a state file: it does not begin with {MAGIC.decode().strip()!r}")
    body = memoryview(data)[_HEAD_BYTES:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : _HEAD_BYTES]:
        raise StateError(f"corrupt state file: the checksum of {len(body)} bytes does not match")
    try:
        image = msgspec.msgpack.decode(body, type=StateImage)
    except (ValueError, RecursionError, OverflowError) as error:  # also of text that is no UTF-8
        raise StateError(f"corrupt state file: {error}") from error
    if image.version != VERSION:
        raise StateError(f"state version {image.version} cannot be read, expected {VERSION}")
    if image.seq < 0 or image.generation < 0:
        raise StateError("corrupt state file: a count is negative")
    return image


def learners_of(data: bytes) -> bytes:
    """The learners' part of a sidecar's state file, as ``replay --state`` writes it; other bytes come back as they are.

    Raises:
        StateError: a sidecar's state file that cannot be read.
    """
    return decode(data).bank if data.startswith(MAGIC) else data


def _plain_number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a state")  # what msgspec asks of an enc_hook


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


def _emitter_rest(emitter: Emitter, _: Context) -> dict[str, object]:
    return {"ids": {span_id for _, span_id in emitter.by_age}}


def _engine_rest(_: Engine, context: Context) -> dict[str, object]:
    remembered_ns = int((context.join.window_s - context.join.grace_s) * 1e9)
    return {"_settings": context.join, "_remembered_ns": remembered_ns, "events": Counter(), "drops": Counter()}


def _joiner_rest(_: Joiner, context: Context) -> dict[str, object]:
    # what is known is told to the learners again: the bank saves facts of what has learned only
    told = {"renamed": [], "succeeded": [], "facts_changed": True, "events": Counter()}
    return {"_settings": context.join, "knowledge": context.knowledge, **told}


def _kv_rest(_: KvSources, context: Context) -> dict[str, object]:
    settings = context.join
    return {
        "_grace_ns": int(settings.grace_s * 1e9),
        "_window_ns": int(settings.window_s * 1e9),
        "_batches_max": settings.kv_batches_max,
        "_sources_max": settings.engines_max,
        "tally": KvTally(),
    }


def _settings_rest(_: object, context: Context) -> dict[str, object]:
    return {"_settings": context.join}


_BLOCK = Kind(
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

_SPANS = Codec(
    [
        Kind(SpanWindow, {"_emitters": dict[str, Emitter]}),
        Kind(
            Emitter,
            {"by_age": list[tuple[int, bytes]], "newest_ns": int, "horizon_ns": int},
            rest=_emitter_rest,
        ),
    ]
)

_STEP_KINDS = [
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
    Kind(
        Sequence,
        {
            "_engine": int,
            "_habits": Habits,
            "window": StepWindow | None,
            "frontier": int,
            "_learned_to": int,
            "_fresh": tuple[int, int] | None,
            "event_unix_ns": int,
            "first_unix_ns": int,
            "votes": SchedulingVotes,
            "scheduling_fact": Scheduling,
            "budget_fact_tokens": float | None,
            "has_summaries": bool,
            "has_journeys": bool,
            "has_exact_context": bool,
            "has_done_stamps": bool,
            "kv": KvSteps,
            "_chunks": list[Chunks],
            "_scheduled_tokens_max": int,
            "_first_finish_unix_ns": int,
            "_longest_run_ns": int,
        },
        rest=_settings_rest,
    ),
]

_KV_KINDS = [
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
            "_bound": list[tuple[KvTimeline, Sequence]],
        },
        rest=_kv_rest,
    ),
]

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
        Request,
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
            "_held": list[Request],
            "_pending": list[tuple[int, bytes, Request]],
            "_emitted_until_unix_ns": int,
            "event_unix_ns": int,
        },
        rest=lambda _, context: {"_settings": context.join, "drops": Counter()},
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
    Kind(Process, {"sequence": Sequence, "warm_up": WarmUp, "requests": list[PendingRequest]}),
    Kind(
        Engine,
        {
            "instance": str,
            "recording": str,
            "number": int,
            "facts": Facts,
            "ratio": BlockRatio,
            "api_queueing": ApiQueueing,
            "_processes": list[Process],
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
        Joiner,
        {
            "_engines": OrderedDict[_Key, Engine],
            "_processes": OrderedDict[_Key, ApiProcess],
            "_aliases": dict[_Key, Engine],
            "_engine_count": int,
            "_apis": OrderedDict[bytes, ApiSpan],
            "_waiting": OrderedDict[bytes, list[tuple[Engine, PendingRequest]]],
            "_waiting_count": int,
            "_releases": dict[str, Release],
            "_config_ids": dict[_Key, str],
            "kv": KvSources,
        },
        rest=_joiner_rest,
    ),
]

_JOIN = Codec([_BLOCK, *_STEP_KINDS, *_KV_KINDS, *_REQUEST_KINDS, *_ENGINE_KINDS])


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
