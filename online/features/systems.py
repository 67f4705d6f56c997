"""The modelling systems of the sources: for each target a table of columns, a product of quantities a line.

    t_prefill    prefill_tokens*token_us          column, and what it is; a name alone is a quantity of that name

Quantities are raw columns, what follows from them alone (``_OF_STEPS``), and what needs the configuration's sheet
(``_OF_SHEET``): ``*_us`` are microseconds at the data-sheet limit, so that their coefficients are near 1. Whatever is
multiplied by 0 is 0, also where the other factor is not known. A table whose quantities are not all known makes no set.
A column that is 0 in all steps of a configuration (experts of a dense model, links of one GPU) is not in its set.

A column without a quantity of the step is constant within a configuration: none of its data can tell the coefficient
from the intercept's. It is not in the live set and serves transfer (online/transfer/donors.py).

``portable`` is in online/features/columns.py. ``physics`` is our own, the default beside it. A GEMM costs the larger of
reading its weights and computing its products; weights are in the intercept, and the hinge adds what computing costs
beyond them at 62 % of peak (measured H100 GEMM tables). A mixture pads its few tokens per expert to tiles: one more
costs less once these are full (Mixtral on H100). While all seats are taken, a request waits for a seat as long as those
before it over the service rate (Little 1961). Where nobody saw the chunks of a prefill, pairs are estimated.

``roofline`` has no coefficients in its source. Here each phase falls into ``compute_us`` or ``memory_us`` by which of
the two is longer at 62 and 80 % of the sheet; weights are read once a step, by the phase that is there.

``picf``, as published, has neither intercept nor these units: its constants per configuration are replaced by those
that make microseconds, which no fit within one can see. Its service rate is B / (KV bytes of a token times the batch).

``mole_rd`` is a mixture of linear experts, y = sum_r g_r (c_r + sum_j beta_rj phi_rj). Its gates g, which sum to 1,
depend on the raw features only, so that it is linear in all coefficients and one solve fits all experts. Away from the
boundaries a gate is 0 or 1; within 0.05 of one, two experts share a row. Saturation is tested first: as written it
could be reached in the middle band only.

``rece`` has a dictionary, ``hfd_tl`` a part of it in three stages (base, configuration, residual), ``bsr_ard``, of
which the sources name the successor only, all of it and what ``physics`` and ``picf`` have beside.

References: docs/systems.md, sources 1 to 7; Williams, Waterman and Patterson, Roofline (CACM 2009); Jacobs et al.,
Adaptive mixtures of local experts (1991); Tipping, Sparse Bayesian learning (JMLR 2001).
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from online.constants import GEMM_EFFICIENCY
from online.rows import Floats, Target

from .columns import INTERCEPT, PORTABLE, UNITS, Column, Facts, FeatureSet, Raw, portable
from .sheets import Sheet, sheet_of

OfStep = Callable[[Raw], Floats]


# --------------------------------------------------- quantities of a step, or of a request


def tokens(raw: Raw) -> Floats:
    """Tokens of a step."""
    return np.asarray(raw["prefill_tokens"] + raw["decode_tokens"])


def pairs(raw: Raw) -> Floats:
    """Query-key pairs of the step's prefills; P^2 / 2 nP (fresh, equal prompts) where nobody saw the chunks."""
    known, prefill = raw["prefill_attention"], raw["prefill_tokens"]
    return np.where(np.isnan(known), prefill * prefill / (2.0 * np.maximum(raw["prefill_requests"], 1.0)), known)


def usage(raw: Raw) -> Floats:
    """Share of the KV cache in use; 0 where it is unknown, so that the row can be learned."""
    return np.nan_to_num(raw["kv_usage_ratio"])


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where there is nothing to divide by: an empty step has no share of anything."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0.0)


def ramp(value: Floats, boundary: float, band: float = 0.05) -> Floats:
    """0 below the zone, 1 above it, linear inside."""
    return np.asarray(np.clip((value - boundary) / (2.0 * band) + 0.5, 0.0, 1.0))


def step_gates(raw: Raw) -> dict[str, Floats]:
    """Weight of each beta regime, each (m,); they sum to 1."""
    share = ratio(raw["prefill_tokens"], tokens(raw))
    saturation = ramp(usage(raw), 0.9)
    rest = 1.0 - saturation
    prefill, decode = rest * ramp(share, 0.7), rest * (1.0 - ramp(share, 0.3))
    return {"saturation": saturation, "prefill": prefill, "decode": decode, "mixed": rest - prefill - decode}


def request_gates(raw: Raw) -> dict[str, Floats]:
    """Weight of each alpha regime; Q is a whole number, so the zone at 2 is between 2 and 3."""
    low = 1.0 - np.clip(raw["waiting"] - 2.0, 0.0, 1.0)
    high = (1.0 - low) * ramp(usage(raw), 0.85)
    return {"low": low, "high": high, "normal": 1.0 - low - high}


def _blocks(*names: str) -> OfStep:
    """KV blocks that were moved or evicted; 0 where no event was told."""
    return lambda raw: np.sum([np.nan_to_num(raw[name]) for name in names], axis=0)


def _gate(gates: Callable[[Raw], dict[str, Floats]], regime: str) -> OfStep:
    return lambda raw: gates(raw)[regime]


_OF_STEPS: dict[str, tuple[str, OfStep]] = {
    "tokens": ("token", tokens),
    "pairs": ("", pairs),
    "usage": ("", usage),
    "pressure": ("", lambda raw: 1.0 / (1.0 - np.clip(usage(raw), 0.0, 1.0) + 0.01)),
    "mix": ("", lambda raw: ratio(raw["prefill_tokens"] * raw["decode_tokens"], tokens(raw) ** 2)),
    "has_prefill": ("", lambda raw: (raw["prefill_tokens"] > 0.0).astype(float)),
    "tokens_to_32": ("token", lambda raw: np.minimum(tokens(raw), 32.0)),
    "batch": ("", lambda raw: np.maximum(raw["running"], 1.0)),
    "offloaded": ("", _blocks("offload_blocks")),
    "restored": ("", _blocks("restore_blocks")),
    "transferred": ("", _blocks("offload_blocks", "restore_blocks")),
    "evicted": ("", _blocks("evicted_blocks")),
    **{regime: ("", _gate(step_gates, regime)) for regime in ("saturation", "prefill", "decode", "mixed")},
    **{regime: ("", _gate(request_gates, regime)) for regime in ("low", "high", "normal")},
}
"""Unit and formula of what follows from raw columns alone."""


# ------------------------------------------------------------- quantities of the sheet


def _hinge_us(sheet: Sheet, raw: Raw) -> Floats:
    """Compute time of the step's matrices beyond the time to read them."""
    needed = tokens(raw) * sheet.token_us / GEMM_EFFICIENCY
    return np.maximum(0.0, needed - sheet.weight_us(tokens(raw)))


def _moved_us(sheet: Sheet, raw: Raw) -> Floats:
    """Keys and values read for the decodes, and written for the prefills."""
    return np.asarray((raw["decode_context_tokens"] + raw["prefill_tokens"]) * sheet.kv_token_us)


def _phases_us(sheet: Sheet, raw: Raw) -> tuple[Floats, Floats]:
    """Compute-bound and memory-bound time of the step at the sheet's limits, each (m,)."""
    prefill, decode, total = raw["prefill_tokens"], raw["decode_tokens"], tokens(raw)
    weights = np.where(total > 0, sheet.weight_us(total), 0.0)
    context, share = raw["decode_context_tokens"], ratio(prefill, total)
    compute = np.array([prefill, decode]) * sheet.token_us + np.array([pairs(raw), context]) * sheet.pair_us
    read = np.array([share, (1.0 - share) * (decode > 0)]) * weights
    memory = read + np.array([prefill, context]) * sheet.kv_token_us
    bound = compute / GEMM_EFFICIENCY > memory / 0.8
    return np.where(bound, compute, 0.0).sum(axis=0), np.where(bound, 0.0, memory).sum(axis=0)


def _fragmentation(sheet: Sheet, raw: Raw) -> Floats:
    """Share of the tokens' places in used blocks that hold none: the half-empty last block of each request."""
    held = raw["decode_context_tokens"] + raw["prefill_tokens"]
    return np.asarray(np.clip(1.0 - ratio(held, raw["kv_blocks_used"] * sheet.block_size), 0.0, 1.0))


def _saturated(raw: Raw, seats: float) -> Floats:
    """Q + 1 where all seats are taken, else 0."""
    return np.where(np.isnan(raw["running"]), np.nan, raw["running"] >= seats) * (raw["waiting"] + 1.0)


def _link_token_us(sheet: Sheet) -> float:
    return (sheet.tp - 1) * sheet.model.hidden * 2.0 * sheet.model.layers / (sheet.link_bytes_per_us or math.inf)


def _host_block_us(sheet: Sheet) -> float:
    host = sheet.host_bytes_per_us if sheet.offload else None
    return sheet.block_size * sheet.model.kv_bytes_per_token / sheet.tp / (host or math.inf)


def _active_expert_us(sheet: Sheet) -> float:
    model = sheet.model
    per_expert = model.experts_per_token / max(model.experts, 1)
    return per_expert * model.expert_flops_per_token / sheet.tp / sheet.flops_per_us


_OF_SHEET: dict[str, tuple[str, Callable[[Sheet], OfStep | float | None]]] = {
    **{name: ("us", operator.attrgetter(name)) for name in ("token_us", "pair_us", "kv_token_us", "expert_us")},
    "weights_us": ("us", lambda s: s.dense_weight_us),
    "link_token_us": ("us", _link_token_us),
    "all_reduce_us": ("us", lambda s: s.all_reduce_us or 0.0),
    "host_block_us": ("us", _host_block_us),
    "active_expert_us": ("us", _active_expert_us),
    "hinge_us": ("us", lambda s: lambda raw: _hinge_us(s, raw)),
    "moved_us": ("us", lambda s: lambda raw: _moved_us(s, raw)),
    "experts_us": ("us", lambda s: lambda raw: s.experts_us(tokens(raw))),
    "compute_us": ("us", lambda s: lambda raw: _phases_us(s, raw)[0]),
    "memory_us": ("us", lambda s: lambda raw: _phases_us(s, raw)[1]),
    "fragmentation": ("", lambda s: lambda raw: _fragmentation(s, raw)),
    "saturated": ("request", lambda s: s.max_seqs and (lambda raw: _saturated(raw, s.max_seqs))),
    "thousand": ("token", lambda _: 1000.0),
    "budget": ("token", lambda s: s.max_batched_tokens),
    "seats": ("request", lambda s: s.max_seqs),
    "longest": ("token", lambda s: s.max_model_len),
    "block": ("", lambda s: s.block_size),
    "experts": ("", lambda s: float(s.model.experts)),
    "experts_per_token": ("", lambda s: float(s.model.experts_per_token)),
    "expert_ranks": ("", lambda s: float(s.model.moe * s.expert_parallel)),
    "is_mixture": ("", lambda s: float(s.model.moe)),
    "inverse_tp": ("", lambda s: 1.0 / s.tp),
    "peers": ("", lambda s: s.tp - 1.0),
    "several_gpus": ("", lambda s: float(s.tp > 1)),
    "per_sm": ("", lambda s: 0.0 if s.sm is None else 1.0 / (s.tp * s.sm)),
    "seat_share": ("", lambda s: 0.0 if s.max_seqs is None else 1.0 / s.max_seqs),
    **{name: ("", operator.attrgetter(name)) for name in ("prefix", "chunked", "offload")},
}
"""Unit, and of a sheet the formula, the number, or None where it does not tell."""
_KNOBS = {"budget": "max_num_batched_tokens", "seats": "max_num_seqs", "longest": "max_model_len"}
"""Words that need a limit of the engine."""


# ----------------------------------------------------------------- columns and systems

_FACTOR = re.compile(r"([*/]?)([^*/]+)")


def _quantity(word: str, target: Target, sheet: Sheet | None) -> tuple[str, OfStep | float | None]:
    """Unit, and formula or number; None where the sheet does not tell it."""
    if word in target.vocabulary:
        return UNITS[word][len("us/") :], operator.itemgetter(word)
    if word in _OF_STEPS:
        return _OF_STEPS[word]
    if word in _OF_SHEET:
        unit, of_sheet = _OF_SHEET[word]
        return unit, None if sheet is None else of_sheet(sheet)
    return "", float(word)


def _column(line: str, target: Target, sheet: Sheet | None) -> tuple[Column, float]:
    """The column of a line, and the number in it: NaN where one is not known."""
    name, definition = (*line.split(), *line.split())[:2]
    if definition == INTERCEPT:
        return Column(name, "us", INTERCEPT, definition), 1.0
    number, factors, units = 1.0, list[OfStep](), Counter[str]()
    for sign, word in _FACTOR.findall(definition):
        unit, value = _quantity(word, target, sheet)
        power = -1 if sign == "/" else 1
        units[unit] += power
        if callable(value):
            factors.append(value)
        else:
            number *= math.nan if value is None else value**power
    measures = [unit for unit, power in units.items() if unit and power > 0]
    unit = "us/us" if "us" in measures else "/".join(filter(None, ("us", "*".join(measures))))
    if not factors:
        return Column(name, unit, INTERCEPT, definition, constant=number), number
    formula = definition if definition in target.vocabulary else functools.partial(_product, number, factors)
    return Column(name, unit, formula, definition), number


def _product(number: float, factors: list[OfStep], raw: Raw) -> Floats:
    values = [factor(raw) for factor in factors]
    product = np.asarray(number * math.prod(values))
    return np.where(np.isnan(product) & np.any(np.equal(values, 0.0), axis=0), 0.0, product)


@dataclass(frozen=True, slots=True)
class System:
    """One modelling system: a text per target, a column a line."""

    name: str
    tables: Mapping[Target, str]

    def table(self, target: Target, facts: Facts) -> tuple[Column, ...] | None:
        """All columns for a configuration, constant ones included; None where the system does not apply."""
        sheet, _ = sheet_of(facts)
        lines = filter(str.strip, self.tables.get(target, "").splitlines())
        columns = [_column(line, target, sheet) for line in lines]
        if not columns or any(math.isnan(number) for _, number in columns):
            return None
        return tuple(column for column, number in columns if number or column.constant is not None)

    def live(self, target: Target, facts: Facts) -> FeatureSet | None:
        """The set that one configuration's rows can identify."""
        live = tuple(column for column in self.table(target, facts) or () if column.constant is None)
        return FeatureSet(self.name, target, live) if live else None


def _system(name: str, step: str, request: str, api: str = "") -> System:
    """The alphas of the sources are those of both waits, unless ``api`` says otherwise."""
    return System(name, {Target.STEP_TIME: step, Target.QUEUE_WAIT: request, Target.API_QUEUEING: api or request})


PHYSICS = _system(
    "physics",
    """
    intercept
    has_prefill
    t_tok             tokens*token_us
    hinge             hinge_us
    t_kv              moved_us
    t_pfattn          pairs*pair_us
    requests
    t_experts         is_mixture*experts_us
    tokens_to_32      is_mixture*tokens_to_32
    t_weight          weights_us
    """,
    """
    intercept
    waiting
    t_prompt          prompt_tokens*token_us
    saturated
    """,
    """
    intercept
    prompt_tokens
    running
    """,
)
BLACKBOX = _system(
    "blackbox",
    """
    intercept
    prefill_tokens
    decode_tokens
    """,
    """
    intercept
    prompt_tokens
    output_tokens
    """,
)
ROOFLINE = _system(
    "roofline",
    """
    intercept
    compute           compute_us
    memory            memory_us
    communication     tokens*all_reduce_us
    """,
    """
    intercept
    prompt_tokens
    """,
)
PICF = _system(
    "picf",
    """
    intercept
    t_prefill         prefill_tokens*token_us
    t_prefill_squared prefill_tokens*prefill_tokens*pair_us
    t_decode_kv       decode_tokens*block*kv_token_us
    decode_running    decode_tokens*running
    mix
    t_decode_experts  decode_tokens*experts_per_token*expert_us
    tokens_per_sm     tokens*per_sm
    usage_decode      usage*decode_tokens
    """,
    """
    intercept
    waiting
    waiting_squared   waiting*waiting*batch*kv_token_us
    pressure
    pressure_waiting  pressure*waiting
    chunks            prompt_tokens/budget
    chunks_running    prompt_tokens*running/budget
    chunked
    seat_share
    """,
)
MOLE_RD = _system(
    "mole_rd",
    """
    saturation.intercept      saturation
    saturation.tokens         saturation*tokens*kv_token_us
    saturation.fragmentation  saturation*fragmentation*tokens
    saturation.pressure       saturation*pressure
    saturation.evictions      saturation*evicted*host_block_us
    prefill.intercept         prefill
    prefill.t_tok             prefill*prefill_tokens*token_us
    prefill.t_squared         prefill*prefill_tokens*prefill_tokens*pair_us
    prefill.requests          prefill*prefill_requests
    prefill.experts           prefill*experts_per_token*prefill_tokens*token_us
    decode.intercept          decode
    decode.t_kv               decode*decode_context_tokens*kv_token_us
    decode.tokens_running     decode*decode_tokens*running
    decode.experts            decode*experts*decode_tokens*expert_us
    decode.offload            decode*transferred*host_block_us
    mixed.intercept           mixed
    mixed.prefill             mixed*prefill_tokens*token_us
    mixed.decode              mixed*decode_tokens*kv_token_us
    mixed.mix                 mixed*mix
    mixed.running_usage       mixed*running*usage
    """,
    """
    low.intercept             low
    low.prompt                low*prompt_tokens/thousand
    high.intercept            high
    high.pressure             high*pressure
    high.waiting_usage        high*waiting*usage
    high.prompt_usage         high*prompt_tokens*usage
    normal.intercept          normal
    normal.waiting            normal*waiting
    normal.chunks             normal*prompt_tokens/budget
    normal.seats              normal*running/seats
    """,
)

_RECE_STEP = """
    intercept
    t_prefill         prefill_tokens*token_us
    t_decode_kv       decode_tokens*kv_token_us
    budget_share      tokens/budget
    prefill_squared   prefill_tokens*prefill_tokens/budget/budget
    decode_squared    decode_tokens*decode_tokens/budget/budget
    prefill_decode    prefill_tokens*decode_tokens/budget/budget
    prefill_usage     prefill_tokens*usage/budget
    decode_running    decode_tokens*running/budget
    usage
    usage_squared     usage*usage
    inverse_tp
    experts_per_token experts_per_token/8
    offload
    expert_parallel   expert_ranks
    t_link            tokens*link_token_us
    link_running      running*peers
    t_offload         offloaded*host_block_us
    t_restore         restored*host_block_us
    t_experts         tokens*active_expert_us
"""
_RECE_REQUEST = """
    intercept
    queue             waiting/seats
    queue_squared     waiting*waiting/seats/seats
    usage
    usage_squared     usage*usage
    prompt            prompt_tokens/longest
    prompt_squared    prompt_tokens*prompt_tokens/longest/longest
    queue_usage       waiting*usage/seats
    prompt_usage      prompt_tokens*usage/longest
    seats             running/seats
    seats_usage       running*usage/seats
    inverse_tp
    prefix
    chunked
    several_gpus
    t_link            prompt_tokens*link_token_us
"""
RECE = _system("rece", _RECE_STEP, _RECE_REQUEST)
HFD_TL = _system(
    "hfd_tl",
    """
    intercept
    t_prefill         prefill_tokens*token_us
    t_decode_kv       decode_tokens*kv_token_us
    budget_share      tokens/budget
    usage_squared     usage*usage
    inverse_tp
    experts           experts/8
    offload
    """,
    """
    intercept
    queue             waiting/seats
    usage
    prompt            prompt_tokens/longest
    queue_squared     waiting*waiting/seats/seats
    inverse_tp
    prefix
    chunked
    """,
)
BSR_ARD = _system(
    "bsr_ard",
    _RECE_STEP
    + """
    t_experts_read    is_mixture*experts_us
    tokens_to_32      is_mixture*tokens_to_32
    has_prefill
    hinge             hinge_us
    t_kv              moved_us
    t_pfattn          pairs*pair_us
    requests
    mix
    usage_decode      usage*decode_tokens
    """,
    _RECE_REQUEST,
)

SYSTEMS = {each.name: each for each in (PHYSICS, BLACKBOX, ROOFLINE, PICF, MOLE_RD, HFD_TL, BSR_ARD, RECE)}
"""By name, beside ``portable``."""


def missing(names: Iterable[str], facts: Facts) -> list[str]:
    """What the facts lack for these sets; a limit of the engine only where they divide by it."""
    sheet, lacks = sheet_of(facts)
    if sheet is None:
        return list(lacks)
    tables = (table for name in names if name in SYSTEMS for table in SYSTEMS[name].tables.values())
    words = set(re.findall(r"[a-z_]+", "".join(tables)))
    return [knob for word, knob in _KNOBS.items() if word in words and _OF_SHEET[word][1](sheet) is None]


def registered() -> tuple[str, ...]:
    """Names a configuration may use, beside ``custom``."""
    return tuple(sorted((PORTABLE, *SYSTEMS)))


def build(name: str, target: Target, facts: Facts) -> FeatureSet | None:
    """The set for one target of one configuration; None where it does not apply: it needs a sheet, and there is none.

    Raises:
        ValueError: if there is no set of that name.
    """
    if name not in registered():
        raise ValueError(f"feature set {name!r} is not one of {', '.join(registered())}")
    return portable(target, facts) if name == PORTABLE else SYSTEMS[name].live(target, facts)
