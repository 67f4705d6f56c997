"""NVIDIA Dynamo: a directory of profile results for its planner, and a look-up table for its mocker.

    selected_prefill_interpolation/raw_data.npz   prefill_isl (tokens), prefill_ttft (ms), prefill_thpt_per_gpu
    selected_decode_interpolation/raw_data.npz    x_kv_usage (0 to 1), y_context_length (tokens), z_itl (ms),
                                                  z_thpt_per_gpu (tokens/s), max_kv_tokens (one element)
    perf_data.npz                                 prefill_isl, prefill_ttft_ms; decode_active_kv_tokens (n,),
                                                  decode_context_length (m,), decode_itl (n, m) in ms
    TRACEFIT.txt                                  what this is, what is lost, which points nobody has seen

Prefill: one request alone, TTFT of tracefit.Config.request (in chunks of the token budget, with the API process).
Decode: step(0, B, K) · mean_factor with K tokens in the cache and B = K / context requests, B >= 1 and at most
``max_num_seqs``; the planner's points are where B is whole, the mocker looks its table up with any.

Guards: every number finite and above zero; lengths from 16 tokens to the engine's ``max_model_len``, else to the
longest that the cache holds or that was seen. Throughput is per GPU: tensor times data parallel ranks share a step.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from online import ConfigSnapshot, Snapshot
from tracefit import Config, TracefitError

from .translation import Assumptions, ExportError, Source, comments, source_of

PREFILL_FILE = "selected_prefill_interpolation/raw_data.npz"
DECODE_FILE = "selected_decode_interpolation/raw_data.npz"
MOCKER_FILE = "perf_data.npz"
NOTE_FILE = "TRACEFIT.txt"
_SHORTEST = 16
_LENGTHS = 12
_TABLE = 100
Floats = NDArray[np.float64]


class _Engine(NamedTuple):
    """What the grids have to cover."""

    client: Config
    kv_tokens: int
    batch_max: int
    longest: int
    gpus: int
    mean_factor: float


class _Decode(NamedTuple):
    """Points of the planner, one column each; ``seen`` says which lie inside of what was learned from."""

    kv_usage: Floats
    context: Floats
    itl_ms: Floats
    tokens_per_s: Floats
    seen: NDArray[np.bool_]


def render_dynamo(snapshot: Snapshot, config: ConfigSnapshot, assumptions: Assumptions) -> Mapping[str, bytes]:
    """Files by their names in the directory.

    Raises:
        ExportError: there are no coefficients, or nobody said what the KV cache holds.
    """
    source = source_of(snapshot, config, assumptions)
    engine = _engine_of(source.client, config)
    try:
        lengths = _geometric(_SHORTEST, engine.longest)
        ttft_ms = _ttft_ms(engine, lengths)
        decode = _decode_points(engine, lengths)
        table = _mocker_table(engine)
    except TracefitError as error:
        raise ExportError(str(error)) from None
    return {
        PREFILL_FILE: _npz(
            prefill_isl=lengths, prefill_ttft=ttft_ms, prefill_thpt_per_gpu=1e3 * lengths / ttft_ms / engine.gpus
        ),
        DECODE_FILE: _npz(
            x_kv_usage=decode.kv_usage,
            y_context_length=decode.context,
            z_itl=decode.itl_ms,
            z_thpt_per_gpu=decode.tokens_per_s,
            max_kv_tokens=np.array([engine.kv_tokens]),
        ),
        MOCKER_FILE: table,
        NOTE_FILE: _note(source, engine, decode),
    }


def _engine_of(client: Config, config: ConfigSnapshot) -> _Engine:
    kv_tokens = client.limits.kv_tokens
    if kv_tokens is None:
        raise ExportError("--kv-tokens: the snapshot does not know how many tokens the KV cache holds")
    if kv_tokens < 2 * _SHORTEST:
        raise ExportError(f"--kv-tokens: a cache of {kv_tokens} tokens holds no request")
    longest = min(_whole_fact(config, "max_model_len") or kv_tokens, kv_tokens)
    ranks = (_whole_fact(config, key) or 1 for key in ("tensor_parallel_size", "data_parallel_size"))
    gpus = 1
    for each in ranks:
        gpus *= each
    return _Engine(
        client,
        kv_tokens,
        client.limits.max_num_seqs or kv_tokens,
        max(longest, 2 * _SHORTEST),
        gpus,
        client.mean_factor,
    )


def _ttft_ms(engine: _Engine, lengths: Floats) -> Floats:
    """Of one request alone, by its prompt."""
    ask = engine.client.assuming(kv_tokens=2 * max(engine.kv_tokens, engine.longest)).request
    return np.array([ask(prompt_tokens=float(each), output_tokens=1.0).ttft.ms for each in lengths])


def _decode_points(engine: _Engine, lengths: Floats) -> _Decode:
    context, batch = [], []
    for each in lengths.tolist():
        most = min(engine.batch_max, int(engine.kv_tokens // each))
        sizes = np.unique(np.round(_geometric(1, max(most, 1)))).tolist()
        context += [each] * len(sizes)
        batch += sizes
    contexts, batches = np.array(context), np.array(batch)
    steps = engine.client.step_time(requests=batch, decode_context_tokens=(contexts * batches).tolist())
    itl_ms = np.array(steps.us) * engine.mean_factor / 1e3
    return _Decode(
        contexts * batches / engine.kv_tokens,
        contexts,
        itl_ms,
        1e3 * batches / itl_ms / engine.gpus,
        np.array([not outside for outside in steps.extrapolated]),
    )


def _mocker_table(engine: _Engine) -> bytes:
    half = _TABLE // 2
    ends = float(_SHORTEST), float(engine.longest)
    lengths = np.unique(np.concatenate([np.linspace(*ends, half), np.geomspace(*ends, half)]))
    kv_tokens = np.linspace(0.0, engine.kv_tokens, _TABLE)
    context = np.geomspace(*ends, _TABLE)  # it decides the batch: an error there should be relative
    batches = np.clip(kv_tokens[:, None] / context[None, :], 1.0, engine.batch_max)
    held = np.maximum(kv_tokens[:, None], context[None, :])  # one request at least, with its context
    steps = engine.client.step_time(requests=batches.ravel().tolist(), decode_context_tokens=held.ravel().tolist())
    itl_ms = np.array(steps.us).reshape(_TABLE, _TABLE) * engine.mean_factor / 1e3
    return _npz(
        prefill_isl=lengths,
        prefill_ttft_ms=_ttft_ms(engine, lengths),
        decode_active_kv_tokens=kv_tokens,
        decode_context_length=context,
        decode_itl=itl_ms,
    )


def _note(source: Source, engine: _Engine, decode: _Decode) -> bytes:
    unseen = [f"  context {c:.0f}, KV usage {u:.4f}" for c, u in zip(decode.context, decode.kv_usage, strict=True)]
    lines = [
        *source.heading,
        f"KV cache {engine.kv_tokens} tokens, at most {engine.batch_max} requests, {engine.gpus} GPUs share a step",
        "made from learned coefficients, not from a profiling run: nothing here was measured at these very points",
        "lost: steps that prefill and decode at once (these tables are for an engine that does one), error bars",
        f"{int(decode.seen.sum())} of {len(decode.seen)} decode points lie inside of what was learned from; outside:",
    ]
    outside = [point for point, inside in zip(unseen, decode.seen.tolist(), strict=True) if not inside]
    return (comments(*lines) + "".join(f"{each}\n" for each in outside)).encode(errors="replace")


def _geometric(low: float, high: float) -> Floats:
    return np.unique(np.round(np.geomspace(low, high, _LENGTHS)))


def _whole_fact(config: ConfigSnapshot, name: str) -> int | None:
    value = config.config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _npz(**arrays: NDArray[np.float64] | NDArray[np.int64]) -> bytes:
    for name, each in arrays.items():
        if not np.isfinite(each).all() or (each < 0.0).any():
            raise ExportError(f"dynamo: {name} would hold a number that is no time")
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]  # numpy's stub takes a keyword of its own for one of them
    return out.getvalue()
