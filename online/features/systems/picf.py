"""PICF: physics-informed compositional features, eight for alpha and eight for beta.

    beta    P flops_per_token / F   P^2 / (tp F)   D kv_blocks_per_token / B   D R   P D / T^2   k D / B   T / (tp sm)
            u D
    alpha   Q    Q^2 / service_rate    p = 1 / (1 - u + eps)    p Q    M / Nb    M R / Nb    1 / Ns    chunked

service_rate = B / (kv_bytes_per_token mean batch); the mean batch is the requests running now. flops_per_token counts
all layers. P^2 / (tp F) is multiplied by the attention FLOPs per pair, D kv_blocks_per_token by the bytes of a token
times the block, and k D by the bytes of an expert, so that all are microseconds: a constant factor per configuration
that no fit within one can see. 1 / Ns and the flag are constant within a configuration. As published there is no
intercept (its reviewers ask for one); the live form has the bias of the configuration.
Reference: docs/systems.md, source 3.
"""

from __future__ import annotations

import numpy as np

from online.features.columns import Column, Raw
from online.features.sheets import Sheet
from online.rows import Floats, Target

from .base import System, column, constant, ratio, tokens, usage

# Guard: no division by 0 at full usage.
EPSILON = 0.01
_PICF = "PICF (source 3)"


def _step(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None:
        return None
    columns = [
        column("t_prefill", lambda raw: raw["prefill_tokens"] * sheet.token_us, _PICF, "us/us"),
        column("t_prefill_squared", lambda raw: raw["prefill_tokens"] ** 2 * sheet.pair_us, _PICF, "us/us"),
        column("t_decode_kv", lambda raw: raw["decode_tokens"] * sheet.kv_token_us * sheet.block_size, _PICF, "us/us"),
        column("decode_running", lambda raw: raw["decode_tokens"] * raw["running"], _PICF, "us/token*request"),
        column("mix", _mix, _PICF),
    ]
    if sheet.model.moe:
        per_token = sheet.model.experts_per_token * sheet.expert_us
        columns.append(column("t_decode_experts", lambda raw: raw["decode_tokens"] * per_token, _PICF, "us/us"))
    if sheet.sm is not None:
        width = float(sheet.tp * sheet.sm)
        columns.append(column("tokens_per_sm", lambda raw: tokens(raw) / width, _PICF, "us/token"))
    columns.append(column("usage_decode", lambda raw: usage(raw) * raw["decode_tokens"], _PICF, "us/token"))
    return tuple(columns)


def _mix(raw: Raw) -> Floats:
    return ratio(raw["prefill_tokens"] * raw["decode_tokens"], tokens(raw) ** 2)


def pressure(raw: Raw) -> Floats:
    """1 / (1 - u + eps): grows without bound as the cache fills."""
    return np.asarray(1.0 / (1.0 - np.clip(usage(raw), 0.0, 1.0) + EPSILON))


def _request(sheet: Sheet | None) -> tuple[Column, ...] | None:
    if sheet is None or sheet.max_batched_tokens is None:
        return None
    budget, seats = sheet.max_batched_tokens, sheet.max_seqs
    columns = [
        column("waiting", "waiting", _PICF, "us/request"),
        column(
            "waiting_squared",
            lambda raw: raw["waiting"] ** 2 * sheet.kv_token_us * np.maximum(raw["running"], 1.0),
            _PICF,
            "us/us",
        ),
        column("pressure", pressure, _PICF),
        column("pressure_waiting", lambda raw: pressure(raw) * raw["waiting"], _PICF, "us/request"),
        column("chunks", lambda raw: raw["prompt_tokens"] / budget, _PICF),
        column("chunks_running", lambda raw: raw["prompt_tokens"] * raw["running"] / budget, _PICF, "us/request"),
        constant("chunked", float(sheet.chunked), _PICF),
    ]
    if seats is not None:
        columns.append(constant("seat_share", 1.0 / seats, _PICF))
    return tuple(columns)


PICF = System(
    name="picf",
    title="physics-informed compositional features",
    reference="source 3",
    tables={Target.STEP_TIME: _step, Target.QUEUE_WAIT: _request, Target.API_QUEUEING: _request},
    absent={
        "prefix hit ratio, effective prompt length (asked for by its reviewers)": (
            "what of a prompt is cached nobody knows when it is queued; prefill tokens are net of hits where steps tell"
        ),
    },
)
