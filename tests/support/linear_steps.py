"""Small simulator of scheduler steps with known coefficients: drift, outliers, warm-up.

    y = beta . (1, prefill_tokens, decode_context_tokens, requests) * speed * (1 + noise) [+ stall]

Seeded and pure; the true vector is the test's oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from online.rows import STEP_FEATURES, RowBlock

BETA = np.array([9000.0, 40.0, 0.12, 160.0])
NAMES = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")


@dataclass(frozen=True)
class Simulated:
    """Rows and the noise-free time of each."""

    rows: RowBlock
    truth_us: np.ndarray


def steps(
    n,
    seed=0,
    *,
    noise=0.01,
    beta=BETA,
    batch=(1, 64),
    prefill_share=0.25,
    drift_at=None,
    gain=1.0,
    stalls=0.0,
    warm_up=False,
    autocorrelation=0.0,
    start_ns=1_700_000_000_000_000_000,
):
    """n steps."""
    rng = np.random.default_rng(seed)
    width = batch[1] - batch[0]
    walk = np.cumsum(rng.normal(0, 2, n)) % max(2 * width, 1)
    requests = batch[0] + np.floor(np.minimum(walk, 2 * width - walk)) if width else np.full(n, float(batch[0]))
    prefill_requests = np.where(rng.random(n) < prefill_share, 1.0, 0.0)
    prefill_tokens = prefill_requests * np.floor(np.exp(rng.normal(5.5, 0.7, n)).clip(4, 2048))
    decodes = requests - prefill_requests * (requests > 1)
    context = np.floor(decodes * np.exp(rng.normal(6.5, 0.3, n)))
    x = np.stack([np.ones(n), prefill_tokens, context, decodes + prefill_requests], axis=1)
    speed = np.ones(n)
    if drift_at is not None:
        speed[drift_at:] = gain
    truth = (x @ np.asarray(beta)) * speed
    shocks = rng.standard_normal(n)
    if autocorrelation:
        for i in range(1, n):
            shocks[i] = autocorrelation * shocks[i - 1] + np.sqrt(1 - autocorrelation**2) * shocks[i]
    y = truth * np.exp(noise * shocks)
    if stalls:
        y = y + (rng.random(n) < stalls) * 5 * truth * (1 + rng.pareto(2.0, n))
    if warm_up:
        y[0] += 12e6
    raw = np.full((n, len(STEP_FEATURES)), np.nan)
    for name, values in (
        ("prefill_tokens", prefill_tokens),
        ("prefill_requests", prefill_requests),
        ("decode_requests", decodes),
        ("decode_tokens", decodes),
        ("decode_context_tokens", context),
        ("requests", decodes + prefill_requests),
    ):
        raw[:, STEP_FEATURES.index(name)] = values
    end_ns = start_ns + np.cumsum(y * 1e3).astype(np.int64)
    return Simulated(RowBlock.of_lines(raw, y, end_ns=end_ns), truth)


def repeated(rows, times):
    """Each row as one of so many such steps."""
    return replace(
        rows,
        raw=np.repeat(rows.raw, times, axis=0),
        offsets=times * np.arange(len(rows) + 1),
        elapsed_us=times * rows.elapsed_us,
    )
