"""Error bars for what was learned from windows: they cover, and they say what cannot be told apart."""

import numpy as np
import pytest

from online import Quality, RowBlock, Target
from online.bank import Bank
from tests.online.test_learner import RLS
from tests.support.linear_steps import repeated

TRUE = np.array([10_000.0, 200.0, 1.5, 300.0])


def windows(count, seed, *, context=1.0, noise=0.02):
    """Rows of 10 steps each with independent prefill, context and requests."""
    chance = np.random.default_rng(seed)
    raw = np.full((count, 16), np.nan)
    requests, prefill = chance.integers(1, 20, count).astype(float), chance.exponential(40, count)
    held = requests * (chance.uniform(50, 500, count) if context else 100.0)
    for column, value in ((0, prefill), (1, 0.1), (2, requests), (3, requests), (4, held), (6, requests)):
        raw[:, column] = value
    elapsed = np.stack((np.ones(count), prefill, held, requests), axis=1) @ TRUE
    elapsed *= 1 + noise * chance.standard_normal(count)
    end_ns = 10**18 + np.arange(count) * 10**9
    return repeated(RowBlock.of_lines(raw, elapsed, end_ns=end_ns, quality=Quality.METRICS), 10)


def features_of(rows, bank=None):
    bank = bank or Bank(RLS)
    bank.learn("c", Target.STEP_TIME, rows)
    return {f.name: f for f in bank.targets("c")["step_time"].models["portable"].features}


def test_well_excited_windows_identify_every_coefficient():
    assert {f.status for f in features_of(windows(150, 0)).values()} == {"identified"}


def test_no_error_bar_is_below_the_systematic_error():
    found = features_of(windows(500, 1, noise=1e-4))
    assert found["intercept"].stderr >= 0.02 * found["intercept"].coefficient
    assert found["prefill_tokens"].stderr >= 0.10 * found["prefill_tokens"].coefficient


@pytest.mark.parametrize("noise", [0.02, 0.15, 0.3, 0.6])
def test_the_status_is_that_of_the_published_error_bar(noise):
    """A reader who divides the coefficient by its error bar finds the status beside it.

    Half of the predictions are off by more than 0.67 of the noise; above 15 % nothing is called identified.
    """
    best = "identified" if noise < 0.2 else "weak"
    for seed in range(4):
        for feature in features_of(windows(100, seed, noise=noise)).values():
            t = feature.coefficient / feature.stderr
            by_t = best if t >= 8.0 else "weak" if t >= 4.0 else "unidentified"
            assert feature.status == by_t, (feature.name, t)


def test_what_trades_with_another_column_is_not_identified():
    found = features_of(windows(60, 2, context=0.0, noise=0.05))
    assert found["decode_context_tokens"].status == "unidentified" or found["requests"].status == "unidentified"


def test_a_handful_of_windows_identifies_nothing():
    found = features_of(windows(8, 3))
    assert {f.status for f in found.values()} == {"unidentified"}
    assert all(f.stderr is None for f in found.values())


def test_intervals_of_90_per_cent_cover():
    inside = []
    for seed in range(16):
        for f, true in zip(features_of(windows(80, seed, noise=0.1)).values(), TRUE, strict=True):
            inside.append(abs(f.coefficient - true) <= 1.645 * f.stderr)
    assert np.mean(inside) >= 0.85


def test_rows_of_single_steps_bring_the_learners_own_error_bars_back():
    bank = Bank(RLS)
    features_of(windows(100, 4), bank)
    rows = windows(100, 5)
    rows.quality[:] = int(Quality.STEPS)
    rows.end_ns[:] += 10**12
    found = features_of(rows, bank)
    assert "unidentified" not in {f.status for f in found.values()}
    assert found["intercept"].stderr < 0.02 * found["intercept"].coefficient


def test_the_rows_behind_the_error_bars_survive_a_restart():
    bank, again = Bank(RLS), Bank(RLS)
    features_of(windows(100, 6), bank)
    again.restore(bank.state())
    assert again.targets("c") == bank.targets("c")
    assert again.state() == bank.state()


def test_merged_windows_keep_the_later_rows():
    first, second = Bank(RLS), Bank(RLS)
    later = windows(100, 8)
    later.end_ns[:] += 10**12
    features_of(windows(100, 7), first)
    features_of(later, second)
    first.merge(second)
    found = first.targets("c")["step_time"].models["portable"].features
    assert {f.status for f in found} == {"identified"}
