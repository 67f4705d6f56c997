"""Our own two sets: ``portable`` in tokens and requests, ``physics`` in microseconds at the data-sheet limit.

``portable`` is made by :mod:`online.features.registry`; here it is a table like the rest, so that it can be pooled and
compared. It needs no sheet, and no column of it is constant. ``physics`` is the recommended default beside it:

    step_time   1   has_prefill   t_tok = T token_us   hinge = max(0, t_tok / 0.62 - t_weight(T))
                t_kv = KV bytes moved / B   t_pfattn = pairs pair_us   requests   t_experts = experts touched / B (MoE)
                tokens_to_32 = min(T, 32) (MoE)
    across      t_weight, shared with t_experts   has_prefill per layer   L [tp > 1]

A GEMM costs the larger of reading its weights and computing its products; the weights are in the intercept, and the
hinge adds what computing costs beyond them at 62 % of peak (measured H100 GEMM tables). Coefficients are near 1.
A mixture pads its few tokens per expert to tiles: one more costs less once these are full (Mixtral on H100).

    api_queueing  1   prompt_tokens   running                                 tokenizing, and the loop one waits for
    queue_wait    1   waiting   t_prompt = M token_us   saturated = [R >= Ns] (Q + 1)     Little's law takes over there

Where nobody saw the chunks of a prefill, pairs are estimated (base.pairs). Reference: Williams, Waterman and Patterson,
Roofline (CACM 2009); docs/systems.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from online.constants import GEMM_EFFICIENCY
from online.features.columns import Column, Raw
from online.features.registry import portable
from online.features.sheets import Sheet
from online.rows import Floats, Target

from .base import System, column, constant, intercept, pairs, tokens

# Measured: on Mixtral on H100; see the module's head.
_FILLED_TOKENS = 32.0
_ROOFLINE = "Roofline (CACM 2009)"


def hinge(sheet: Sheet, step_tokens: Floats) -> Floats:
    """Compute time of the step's matrices beyond the time to read them."""
    needed = step_tokens * sheet.token_us / GEMM_EFFICIENCY
    return np.maximum(0.0, needed - sheet.weight_us(step_tokens))


def moved_us(sheet: Sheet, raw: Raw) -> Floats:
    """Keys and values read for the decodes, and written for the prefills."""
    read = sheet.kv_us(raw["decode_context_tokens"], raw["decode_requests"])
    return np.asarray(read + raw["prefill_tokens"] * sheet.kv_token_us)


def has_prefill(raw: Raw) -> Floats:
    """1 in a step with any prefill: it leaves the decode-only graph."""
    return (raw["prefill_tokens"] > 0).astype(float)


def filling(raw: Raw) -> Floats:
    """Tokens of a step, up to where the tiles of a mixture's experts are full."""
    return np.minimum(tokens(raw), _FILLED_TOKENS)


def _step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    layers = float(sheet.model.layers)
    columns = [
        intercept("launch floors, sampling, the loop itself; weights of the model"),
        column("has_prefill", has_prefill, "leaving the decode-only graph"),
        column("t_tok", lambda raw: tokens(raw) * sheet.token_us, _ROOFLINE, "us/us"),
        column("hinge", lambda raw: hinge(sheet, tokens(raw)), _ROOFLINE, "us/us"),
        column("t_kv", lambda raw: moved_us(sheet, raw), _ROOFLINE, "us/us"),
        column("t_pfattn", lambda raw: pairs(raw) * sheet.pair_us, _ROOFLINE, "us/us"),
        column("requests", "requests", "per-request work of scheduler and sampler", "us/request"),
    ]
    if sheet.model.moe:
        columns.append(column("t_experts", lambda raw: sheet.experts_us(tokens(raw)), "experts touched", "us/us"))
        columns.append(column("tokens_to_32", filling, "tiles of the experts' products fill up", "us/token"))
    columns.append(constant("t_weight", sheet.dense_weight_us, "weights / B: most of what looks like fixed overhead"))
    columns.append(constant("layers", layers, "launches per layer"))
    columns.append(constant("layers_tp", layers if sheet.tp > 1 else 0.0, "two all-reduces a layer"))
    return tuple(columns)


def _ties(m: Floats, live: tuple[str, ...], names: tuple[str, ...], constants: Mapping[str, float]) -> None:
    """Launches of a prefill scale with the layers; experts are weights like others."""
    if "layers" not in constants:
        return
    m[live.index("intercept"), names.index("layers")] = 0.0
    m[live.index("has_prefill"), names.index("has_prefill")] = constants["layers"]
    if "t_experts" in live:
        m[live.index("t_experts"), names.index("t_experts")] = 0.0
        m[live.index("t_experts"), names.index("t_weight")] = 1.0


def _api(_: Sheet | None) -> tuple[Column, ...]:
    return (
        intercept("HTTP, templates, hand-over"),
        column("prompt_tokens", "prompt_tokens", "tokenizing", "us/token"),
        column("running", "running", "output processing shares the process", "us/request"),
    )


def _queue(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_seqs is None:
        return None
    seats = sheet.max_seqs
    return (
        intercept("rest of the running step"),
        column("waiting", "waiting", "those before it", "us/request"),
        column("t_prompt", lambda raw: raw["prompt_tokens"] * sheet.token_us, "its own prefill", "us/us"),
        column(
            "saturated",
            lambda raw: np.where(np.isnan(raw["running"]), np.nan, raw["running"] >= seats) * (raw["waiting"] + 1.0),
            "Little (1961): the wait for a seat is those before it over the service rate",
            "us/request",
        ),
    )


PHYSICS = System(
    name="physics",
    title="compact roofline columns in physical microseconds",
    reference="this project",
    tables={Target.STEP_TIME: _step, Target.API_QUEUEING: _api, Target.QUEUE_WAIT: _queue},
    ties=_ties,
)


def _portable_table(target: Target) -> Callable[[Sheet | None], tuple[Column, ...]]:
    return lambda sheet: portable(target, {} if sheet is None else sheet.model.expert_facts).columns


PORTABLE = System(
    name="portable",
    title="tokens, context and requests: what every consumer understands",
    reference="BLIS trained-physics basis",
    tables={target: _portable_table(target) for target in Target},
)
