"""Streams of the simulator beside the project, as rows, with the compact physics columns that fit its machines.

Seeds, segment orders and loads here are not those the settings were tuned on.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass

import numpy as np

from collector.config.schema import BankConfig, Config
from online.features.columns import Column, FeatureSet
from online.rows import STEP_FEATURES, RowBlock, Target
from online.target import TargetState
from tests.support.paths import ROOT

SIMULATOR = ROOT.parent / "shared" / "tools" / "streams.py"

ORDERS = (
    """reasoning .12 .5, general .1 .9, decode_heavy .14 .6, prefill_heavy .1 .75, roleplay .12 .7, codegen .1 1.1,
    general .12 .35, decode_heavy .2 .95""",
    """codegen .15 .6, prefill_heavy .1 .5, reasoning .1 .85, general .1 1, roleplay .15 .45, decode_heavy .1 .4,
    general .15 .75, prefill_heavy .15 .65""",
)
"""Workload, share of the steps, load."""


def segments(order):
    """Segments of one order, as the simulator takes them."""
    each = [one.split() for one in ORDERS[order].split(",")]
    return [[float(share), workload, float(load)] for workload, share, load in each]


def load_simulator():
    """The simulator's module, or None where it is absent."""
    if not SIMULATOR.exists():
        return None
    spec = importlib.util.spec_from_file_location("simulator_streams", SIMULATOR)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def physics(cfg):
    """Columns in physical us: tokens at the compute peak, weights and KV at the memory peak, and the hinge between."""
    model, gpu = cfg.arch(), cfg.hw()
    layers, width, tp = model["L"], model["d"], cfg.tp
    head = width // model["H"]
    bytes_us, flop_us = gpu["bw"] * 1e6, gpu["tf"] * 1e6
    attention = width * (2 * width + 2 * head * model["kvh"])
    ffn = 3 * width * model["dff"]
    experts, chosen = model["N"], model["k"] or 1
    token_us = 2 * layers * (attention + ffn * chosen) / tp / flop_us
    attention_us, ffn_us = 2 * layers * attention / tp / bytes_us, 2 * layers * ffn / tp / bytes_us
    kv_us = 4 * model["kvh"] / tp * head * layers / bytes_us

    def tokens(raw):
        return raw["prefill_tokens"] + raw["decode_tokens"]

    def touched(raw):
        return experts * (1 - (1 - chosen / experts) ** tokens(raw)) if experts else 1.0

    def hinge(raw):
        return np.maximum(0.0, tokens(raw) * token_us / 0.62 - (attention_us + ffn_us * touched(raw)))

    columns = [
        Column("intercept", "us", "intercept"),
        Column("has_prefill", "us", lambda raw: (raw["prefill_tokens"] > 0) * 1.0),
        Column("t_tok", "1", lambda raw: tokens(raw) * token_us),
        Column("hinge", "1", hinge),
        Column("t_kv", "1", lambda raw: raw["decode_context_tokens"] * kv_us),
        Column("t_pfattn", "1", lambda raw: raw["prefill_attention"] * 4 * model["H"] / tp * head * layers / flop_us),
        Column("requests", "us/request", "requests"),
    ]
    if experts:
        columns.append(Column("t_experts", "1", lambda raw: ffn_us * touched(raw)))
    return FeatureSet("compact", Target.STEP_TIME, tuple(columns))


def rows_of(stream):
    """The simulator's steps as rows of one step each."""
    steps = stream.steps
    raw = np.zeros((len(steps["cycle"]), len(STEP_FEATURES)))
    names = {
        "prefill_tokens": "pf_tok",
        "prefill_requests": "n_pf",
        "decode_requests": "n_dc",
        "decode_tokens": "n_dc",
        "decode_context_tokens": "sum_ctx",
        "prefill_attention": "pf_work",
        "running": "running",
        "waiting": "waiting",
    }
    for ours, theirs in names.items():
        raw[:, STEP_FEATURES.index(ours)] = steps[theirs]
    raw[:, STEP_FEATURES.index("requests")] = steps["n_pf"] + steps["n_dc"]
    return RowBlock.of_lines(raw, steps["cycle"], end_ns=((steps["t"] + steps["cycle"]) * 1e3).astype(np.int64))


@dataclass
class Run:
    """Prequential predictions of one run, all (n,), NaN before the first fit; and the learner at its end."""

    model: object
    y: np.ndarray
    slow: np.ndarray
    live: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def ape(self, which):
        """Relative error of ``slow`` or ``live``, (n,)."""
        return np.abs(getattr(self, which) - self.y) / self.y

    def covered(self):
        """Whether each row fell between P10 and P90, (n,)."""
        return (self.y >= self.low) & (self.y <= self.high)


def prequential(rows, features, hook=None, *, block_rows=32, settings=None, residual=None):
    """Predict every block of rows, then learn it; hook(rows so far, learner) after each block."""
    settings = settings or Config(learners=("rls",), live_sets=(), bank=BankConfig(block_rows=block_rows))
    state = TargetState(Target.STEP_TIME, settings)
    state.offer(features, lambda _features: None, published=True)
    design, _ = state.matrix.evaluate(rows)
    model = state.models[features.name]
    n = len(design)
    run = Run(model, design.elapsed_us, *(np.full(n, np.nan) for _ in range(4)))
    at = 0
    for block in state.cutter.push(design):
        here = slice(at, at + len(block))
        if model.started:
            run.slow[here] = block.x @ model.members.slow.beta[: len(features)]
            run.live[here] = block.base_us = model.predict(block)
            ratio = model.members.champion.intervals.ratios(block.stratum)
            run.low[here], run.high[here] = block.base_us * ratio[:, 0], block.base_us * ratio[:, 2]
            if residual is not None:
                run.live[here] = residual.predict(block)
                residual.learn(block)
        model.learn(block)
        at += len(block)
        if hook is not None:
            hook(at, model)
    return run
