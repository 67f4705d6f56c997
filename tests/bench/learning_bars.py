"""Whether what is printed can be bet on: error bars, bands and hold-outs. Called by tests/bench/bench_learning.py.

Streams are of generators and seeds of this module, at which nothing was chosen. The memory and width of the bands were
chosen on the recordings that are scored here; how bands do that are frozen after other parts of a recording is printed
beside it. What a coefficient of a machine that no line fits should be is the robust projection of 400,000 of its rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from collector.config.schema import Config
from online.bank import Bank
from online.blocks import stratum_name
from online.features import portable
from online.rows import STEP_FEATURES, RowBlock, Target
from online.target import TargetState
from tests.support.linear_steps import BETA, NAMES, steps
from tests.support.paths import DATA
from tests.support.pipelines import new_pipeline, step_rows
from tests.support.uneven_steps import noise

RLS = Config(learners=("rls",))
STEP = Target.STEP_TIME
ENDS = (320, 640, 1280, 2560, 10_240)
STREAMS = 40
NORMAL_95 = 1.96
LEARNED = 0.6
OTHER_PARTS = (0.36, 0.42, 0.48, 0.54)
"""Frozen after these, and judged on as much again times 2 / 3."""
HOLDOUT_LIMITS = {"c10": 5.5, "c5": 6.5, "c1": 4.2, "c6": 5.9, "c2": 12.5}
WORSE_MAX = 0.5


def measure(board, pool, directory: Path | None = None):
    """All of it; recordings are those of ``directory``, the bundled ones without it."""
    _measure_coverage(board, pool)
    _measure_misfit(board, pool)
    paths = sorted((directory or DATA).glob("*/otlp.pb.gz"))
    others = []
    for found, inside in pool.map(_recording, paths):
        for each in found:
            board.line(*each)
        others += inside
    good = sum(70 <= each <= 90 for each in others)
    off = float(np.sqrt(np.mean((np.array(others) - 80.0) ** 2)))
    what = f"P10-P90 after 36 to 54 %: 70..90 in {good} of {len(others)}, worst {min(others):.0f} %; off 80 by"
    board.line(what, f"{off:.1f} pp")


# ------------------------------------------------------------------- streams


def _stream(job):
    autocorrelation, seed = job
    rows = steps(ENDS[-1], seed, noise=0.03, batch=(1, 32), autocorrelation=autocorrelation).rows
    return _judged(rows, BETA)


def _judged(rows, truth):
    """Per end and coefficient: its error, its standard error, whether it is called identified."""
    bank, start, found = Bank(RLS), 0, []
    for end in ENDS:
        bank.learn("c", STEP, rows.slice(start, end))
        start = end
        features = bank.targets("c")[STEP.value].models["portable"].features
        found.append(
            [
                (f.coefficient - value, np.inf if f.stderr is None else f.stderr, f.status == "identified")
                for f, value in zip(features, truth, strict=True)
            ]
        )
    return np.array(found)


def _held(found):
    """Whether the 95 % intervals hold the truth."""
    return np.abs(found[..., 0]) < NORMAL_95 * found[..., 1]


def _score(error, stderr):
    """Interval score of 95 % intervals: their length, and 40 times what they miss the truth by."""
    half = NORMAL_95 * stderr
    return 2.0 * half + 40.0 * np.maximum(np.abs(error) - half, 0.0)


def _measure_coverage(board, pool):
    for autocorrelation, least in ((0.0, 90), (0.9, 90), (0.97, 75)):
        jobs = [(autocorrelation, 910_000 + seed) for seed in range(STREAMS)]
        found = np.array(list(pool.map(_stream, jobs)))
        for k, end in enumerate(ENDS):
            hit, named = 100 * _held(found[:, k]).mean(), 100 * found[:, k, :, 2].mean()
            what = f"95 % intervals cover, AR(1) {autocorrelation}, {end} rows ({named:.0f} % identified)"
            board.line(what, f"{hit:.1f} %", f">= {least} %", bool(hit >= least))


def _padded(n, seed, memory):
    """Columns (n, 4) and times (n,) of a machine of pads of 8 and 128, a step at 17 requests, and bent context."""
    rows = steps(n, seed, batch=(1, 32), prefill_share=0.2).rows
    prefill, context, requests = (rows.raw[:, STEP_FEATURES.index(name)] for name in NAMES[1:])
    us = 9000.0 + 40 * 128 * np.ceil(prefill / 128) + 160 * 8 * np.ceil(requests / 8) + 1500 * (requests > 16)
    us += 0.12 * context**1.15 * 1e4**-0.15
    us *= np.exp(noise(np.random.default_rng([seed, 5]), n, memory))
    return rows.raw, np.column_stack([np.ones(n), prefill, context, requests]), us


def _projection(memory):
    """Of 400,000 rows: relative least squares with Huber's weights."""
    _, x, y = _padded(400_000, 930_000, memory)
    beta, share = np.zeros(4), np.ones(len(y))
    for passes in range(20):
        predicted = np.clip(x @ beta, 0.5 * y, 2.0 * y) if passes else y
        weight = share / predicted**2
        beta = np.linalg.solve((x * weight[:, None]).T @ x, x.T @ (weight * y))
        off = np.abs(y / np.maximum(x @ beta, 1.0) - 1.0)
        share = 2.5 / np.maximum(off / (1.4826 * np.median(off)), 2.5)
    return beta


def _misfit_stream(job):
    memory, seed, truth = job
    raw, _, us = _padded(ENDS[-1], seed, memory)
    end_ns = 1_700_000_000_000_000_000 + np.cumsum(us * 1e3).astype(np.int64)
    return _judged(RowBlock.of_lines(raw, us, end_ns=end_ns), truth)


def _measure_misfit(board, pool):
    for memory in (0.0, 0.9):
        truth = _projection(memory)
        found = np.array(list(pool.map(_misfit_stream, [(memory, 931_000 + seed, truth) for seed in range(STREAMS)])))
        for k, end in enumerate(ENDS):
            error, stderr = found[:, k, :, 0], found[:, k, :, 1]
            hit = 100 * _held(found[:, k]).mean()
            what, last = f"no line fits, AR(1) {memory}, {end} rows: 95 % intervals cover", end == ENDS[-1]
            board.line(what, f"{hit:.1f} %", "90..97 %" if last else "", 90 <= hit <= 97 if last else None)
            calibrated = np.broadcast_to(np.sqrt((error**2).mean(axis=0)), error.shape)
            score = (_score(error, stderr).mean(axis=0) / _score(error, calibrated).mean(axis=0)).max()
            board.line(
                "  interval score by that of calibrated bars, the worst coefficient",
                f"{score:.2f}",
                "<= 1.5" if last else "",
                bool(score <= 1.5) if last else None,
            )


# ------------------------------------------------------------------- recordings


def _recording(path):
    """Lines, and what bands hold that are frozen after other parts."""
    short = path.parent.name.partition("_")[0]
    try:
        _, rows = step_rows(new_pipeline(), [path])
    except ValueError:
        return [], []  # no steps in it
    if len(rows) < 500:
        return [], []
    return list(_holdout(short, rows)), [
        _frozen(rows, int(part * len(rows)), int(part / LEARNED * len(rows)))[2] for part in OTHER_PARTS
    ]


def _frozen(rows: RowBlock, cut: int, end: int):
    """Of rows cut..end-1, by a snapshot of those before: error without and with factors, and inside the band, %."""
    state = TargetState(STEP, RLS)
    state.offer(portable(STEP))
    state.learn(rows.slice(0, cut))
    state.flush()
    rest = state.matrix.evaluate(rows.slice(cut, end)).design
    model, y = state.models["portable"], rest.elapsed_us
    plain = rest.x @ model.fit.beta[: len(model.features)]
    shaped = plain * np.exp(model.log_factors(rest.cell))
    band = state.snapshot().interval
    pooled = (band.p10, band.p50, band.p90)
    ratio = np.array([band.strata.get(stratum_name(int(s)), pooled) for s in rest.stratum])
    inside = (y >= ratio[:, 0] * shaped) & (y <= ratio[:, 2] * shaped)
    return *(100 * float(np.mean(np.abs(f / y - 1.0))) for f in (plain, shaped)), 100 * float(inside.mean())


def _holdout(short, rows: RowBlock):
    """What a snapshot after the first 60 % of the rows says of the rest."""
    without, error, inside = _frozen(rows, int(LEARNED * len(rows)), len(rows))
    limit = HOLDOUT_LIMITS.get(short)
    target = f"<= {without + WORSE_MAX:.1f} %" if limit is None else f"<= {limit} %"
    good = error <= without + WORSE_MAX and (limit is None or error <= limit)
    yield f"hold-out of single steps, {short} (without factors {without:.1f} %)", f"{error:.1f} %", target, good
    yield f"P10-P90 of a snapshot holds of the last 40 %, {short}", f"{inside:.1f} %", "70..90 %", 70 <= inside <= 90
