"""What a system is: tables of columns per target, made from a configuration's sheet.

A table is written once, with every column of its source. Its live form leaves out the columns that are constant within
one configuration, and those that are zero there (experts of a dense model, links of a single GPU): no data of that
configuration can say anything about their coefficients (algorithms: identifiability). Their values go into transfer:
with beta = (live, constant),

    x_live beta_live + sum_j k_j beta_j    k_j: value of the j-th constant column here    = intercept of the live form

so a live form has an intercept also where its source has none; unless its columns add up to one already (gates).

**Our own two sets.** ``portable`` in tokens and requests, ``physics`` in microseconds at the data-sheet limit.

``portable`` is made by :func:`online.features.portable`; here it is a table like the rest, so that it can be pooled and
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

Where nobody saw the chunks of a prefill, pairs are estimated. Reference: Williams, Waterman and Patterson,
Roofline (CACM 2009); docs/systems.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from online.constants import GEMM_EFFICIENCY
from online.features.columns import INTERCEPT, Column, Facts, FeatureSet, Raw, portable, register
from online.features.sheets import Sheet, sheet_of
from online.rows import Floats, Target

Table = Callable[[Sheet | None], tuple[Column, ...] | None]
"""Columns of one target; None where the sheet lacks what the formulas need."""


Ties = Callable[[Floats, tuple[str, ...], tuple[str, ...], Mapping[str, float]], None]


@dataclass(frozen=True, slots=True)
class System:
    """One modelling system.

    Attributes:
        name: as configured.
        title: in one line.
        reference: where it is from.
        tables: per target.
        absent: features of the source that our telemetry cannot give, with the reason.
        ties: adjusts the map from full to live coefficients (:mod:`online.transfer`) in place: ``(m, live, full,
            constants)``; for coefficients that scale with a constant, or that two columns share.
        gated_intercepts: its columns hold an intercept in parts, weighed by gates that sum to 1; one more would be
            their sum.
    """

    name: str
    title: str
    reference: str
    tables: Mapping[Target, Table]
    absent: Mapping[str, str] = field(default_factory=dict)
    ties: Ties | None = None
    gated_intercepts: bool = False

    def table(self, target: Target, facts: Facts) -> tuple[Column, ...] | None:
        """All columns for a configuration, constant ones included; None where the system does not apply."""
        make = self.tables.get(target)
        return None if make is None else make(sheet_of(facts)[0])

    def live(self, target: Target, facts: Facts) -> FeatureSet | None:
        """The set that one configuration's rows can identify."""
        columns = self.table(target, facts)
        if columns is None:
            return None
        varying = tuple(c for c in columns if not c.constant)
        return FeatureSet(self.name, target, varying if self.gated_intercepts else with_intercept(varying))

    def register(self) -> None:
        """Make the live form available under the system's name."""
        register(self.name, self.live)


def column(
    name: str, formula: str | Callable[[Raw], Floats], reference: str, unit: str = "us", *, constant: bool = False
) -> Column:
    """One line of a table."""
    return Column(name, unit, formula, reference, constant=constant)


def constant(name: str, value: float, reference: str) -> Column:
    """A column with one value per configuration."""
    return Column(name, "us", lambda raw: np.full(len(raw), value), reference, constant=True)


def intercept(reference: str) -> Column:
    """What a step (or a request) costs however little it does."""
    return Column(INTERCEPT, "us", INTERCEPT, reference)


def with_intercept(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Columns of a live form that has an intercept."""
    if any(c.formula == INTERCEPT for c in columns):
        return columns
    return (intercept("bias of the configuration, in place of the columns that are constant within it"), *columns)


def constant_values(columns: tuple[Column, ...]) -> dict[str, float]:
    """Value of each constant column in this configuration."""
    nothing = Raw(np.zeros((1, 0)), ())
    return {
        c.name: float(np.asarray(c.formula(nothing))[0])
        for c in columns
        if c.constant and not isinstance(c.formula, str)
    }


def full(system: System, target: Target, facts: Facts) -> tuple[tuple[Column, ...], dict[str, float]] | None:
    """All columns, and the values of the constant ones; None where the system does not apply."""
    columns = system.table(target, facts)
    return None if columns is None else (columns, constant_values(columns))


def tokens(raw: Raw) -> Floats:
    """T = P + D, tokens of a step."""
    return np.asarray(raw["prefill_tokens"] + raw["decode_tokens"])


def pairs(raw: Raw) -> Floats:
    """Query-key pairs of the step's prefills; P^2 / 2 nP (fresh, equal prompts) where nobody saw the chunks."""
    known, prefill = raw["prefill_attention"], raw["prefill_tokens"]
    return np.where(np.isnan(known), prefill * prefill / (2.0 * np.maximum(raw["prefill_requests"], 1.0)), known)


def usage(raw: Raw) -> Floats:
    """Share of the KV cache in use; 0 where nobody told: such a row is learned without it."""
    return np.nan_to_num(raw["kv_usage_ratio"])


def moved_blocks(raw: Raw, name: str) -> Floats:
    """KV blocks that were moved or evicted; 0 where no event was told."""
    return np.nan_to_num(raw[name])


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """0 where there is nothing to divide by: an empty step has no share of anything."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0.0)


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
