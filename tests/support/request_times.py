"""Times of requests with a known mean and a long tail."""

import numpy as np

from online.rows import REQUEST_FEATURES, RowBlock


def skewed_times(n, seed, *, fixed_us=800.0, sigma=0.8, tokens="output_tokens"):
    """n requests of 10 to 2,000 tokens; lognormal around a line that is their mean."""
    rng = np.random.default_rng(seed)
    raw = np.full((n, len(REQUEST_FEATURES)), np.nan)
    count = np.floor(rng.uniform(10, 2000, n))
    raw[:, REQUEST_FEATURES.index(tokens)] = count
    noise = np.exp(sigma * rng.standard_normal(n) - 0.5 * sigma**2)
    end_ns = 1_700_000_000_000_000_000 + np.arange(n) * 1_000_000
    return RowBlock.of_lines(raw, (fixed_us + count) * noise, end_ns=end_ns)
