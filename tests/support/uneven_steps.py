"""Steps of machines that no line fits, on which nothing changes, or their speed, or the price of one kind of work.

    y = speed(t) (5000 + price(t) prefill + 0.05 context + 60 requests + what the kind adds) exp(noise)

Seeded and pure. Regimes of load and context follow each other; a fifth of the steps prefill.
"""

from __future__ import annotations

import numpy as np

from online.rows import STEP_FEATURES, RowBlock

NOISE = 0.03
STEADY = ("iid", "ar", "tiles", "quadratic", "curved", "mix")
"""Kinds of machine whose speed never changes: white noise, noise that remembers 100 steps, time that jumps with the
batch, attention, context to the power of 1.15, and load that jumps between extremes."""


def work(rng: np.random.Generator, n: int, kind: str) -> dict[str, np.ndarray]:
    """Columns of n steps."""
    load, context = np.empty(n), np.full(n, 600.0)
    loads = (1, 3, 60, 200) if kind == "mix" else (2, 4, 8, 16, 40)
    at = 0
    while at < n:
        to = at + int(rng.integers(200, 800) if kind == "mix" else rng.integers(400, 2000))
        load[at:to] = rng.choice(loads)
        if kind in ("curved", "quadratic"):
            context[at:to] = rng.choice([200, 800, 3000, 12_000])
        at = to
    requests = np.maximum(1, rng.poisson(load)).astype(float)
    prefill = (rng.random(n) < 0.2) * rng.integers(16, 1024, n).astype(float)
    context = requests * context * np.exp(rng.normal(0, 0.25, n))
    return {"prefill_tokens": prefill, "decode_context_tokens": context, "requests": requests}


def noise(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    """Relative noise of 3 %, of which each step hands ``memory`` on to the next, (n,)."""
    shocks = rng.normal(0, NOISE, n)
    if memory:
        shocks[1:] *= np.sqrt(1 - memory**2)
        for i in range(1, n):
            shocks[i] += memory * shocks[i - 1]
    return shocks


def plain(kind, seed, n=20_000, *, speed=1.0, prefill_gain=1.0) -> RowBlock:
    """Steps of one kind of machine; ``speed`` and ``prefill_gain``: new time per old time of each step, (n,)."""
    rng = np.random.default_rng([seed, *kind.encode()])
    columns = work(rng, n, kind)
    prefill, context, requests = columns.values()
    us = 5000 + 25.0 * prefill_gain * prefill + 60 * requests
    us += 0.05 * (context**1.15 * 5e3**-0.15 if kind == "curved" else context)
    if kind == "tiles":
        us += 900 * np.ceil(requests / 8) + 2500 * (requests > 16)
    if kind == "quadratic":
        us += 2e-3 * prefill * (prefill / 2 + context / requests)
    return of_columns(columns, us * speed * np.exp(noise(rng, n, 0.99 if kind == "ar" else 0.0)))


def uneven(seed, n=20_000, *, speed=1.0) -> RowBlock:
    """A machine of its own for each seed: what a batch costs is drawn per batch, and a neighbour disturbs it.

    Every batch size costs its own share more or less than the line (20 %), context is bent, prefill pays for tiles of
    64; 5.5 % of noise, half of which remembers 10 steps, 0.5 % stalls, and bursts of 10 to 60 steps at 1.2 to 1.5 times
    the time, one in about 3000 steps.
    """
    rng = np.random.default_rng([seed, 77])
    columns = work(rng, n, "uneven")
    prefill, context, requests = columns.values()
    share = np.exp(rng.normal(0, 0.2, 400))[np.minimum(requests, 399).astype(int)]
    us = (9000 + 900 * requests) * share + 0.4 * context**0.9 + 150 * 64 * np.ceil(prefill / 64)
    us *= np.exp(1.3 * (noise(rng, n, 0.0) + noise(rng, n, 0.9)))
    at = int(rng.exponential(3000))
    while at < n:
        to = at + int(rng.integers(10, 60))
        us[at:to] *= rng.uniform(1.2, 1.5)
        at = to + int(rng.exponential(3000))
    us *= 1 + (rng.random(n) < 0.005) * rng.pareto(1.5, n)
    return of_columns(columns, us * speed)


def since(n: int, onset: int, gain: float) -> np.ndarray:
    """1 before the onset, the gain from there on, (n,)."""
    return np.where(np.arange(n) < onset, 1.0, gain)


def ramp(n: int, onset: int, rows: int, gain: float) -> np.ndarray:
    """From 1 to the gain in that many steps, evenly in the logarithm, (n,)."""
    return gain ** np.clip((np.arange(n) - onset) / rows, 0.0, 1.0)


def of_columns(columns: dict[str, np.ndarray], us: np.ndarray) -> RowBlock:
    """Rows of one step each."""
    raw = np.zeros((len(us), len(STEP_FEATURES)))
    for name, values in columns.items():
        raw[:, STEP_FEATURES.index(name)] = values
    return RowBlock.of_lines(raw, us, end_ns=1_700_000_000_000_000_000 + np.cumsum(us * 1e3).astype(np.int64))
