"""What a data sheet and donors say of a configuration's step time, and how far its own rows are believed."""

import numpy as np
import pytest

from collector.config import Config
from online import STEP_FEATURES, Bank
from online.transfer.sheet import HIDES_HITS, terms_of
from tests.support.banks import PORTABLE, STEP, coefficients, features_of, told
from tests.support.configurations import CONFIGS
from tests.support.uneven_steps import of_columns

THETA = np.array([60.0, 12.0, 35.0, 9.0, 20.0, 1.0, 1.25])
MODELS = ("7b", "70b", "mixtral")


def beta_of(name, theta=THETA):
    return terms_of(CONFIGS[name]).beta(theta)


def step_of(beta, prefill, context, requests):
    """Columns of a step for these coefficients; five of them are of Mixtral, whose tokens pick two of eight experts."""
    return np.array([1.0, prefill, context, requests, 1.0 - 0.75 ** (prefill + requests)])[: len(beta)]


def rows_of(beta, n=600, seed=0, spread=0.02, noise=0.01, prefill=0.0):
    """Steps of 4 to 64 requests, contexts of 700 tokens give or take ``spread``: batch and context hardly part."""
    rng = np.random.default_rng(seed)
    requests = rng.integers(4, 65, n).astype(float)
    context = requests * 700.0 * (1.0 + spread * rng.standard_normal(n))
    prompts = rng.integers(16, 500, n) * (rng.random(n) < prefill)
    columns = {"requests": requests, "prefill_tokens": prompts, "decode_requests": requests, "decode_tokens": requests}
    x = np.column_stack([np.ones(n), prompts, context, requests, 1.0 - 0.75 ** (prompts + requests)])
    exact = x[:, : len(beta)] @ beta
    elapsed = exact * (1.0 + noise * rng.standard_normal(n))
    return of_columns(columns | {"decode_context_tokens": context}, elapsed)


def described(name, donors=(), **facts):
    bank = Bank(PORTABLE)
    for state in donors:
        bank.add_donors(state)
    bank.describe("c", CONFIGS[name] | {"model": name} | facts)
    return bank


def lent(names, theta=THETA):
    """The state of a donor by each of these names."""
    states = {}
    for number, name in enumerate(names):
        bank = Bank(PORTABLE)
        bank.describe(name, CONFIGS[name] | {"model": name})
        bank.learn(name, STEP, rows_of(beta_of(name, theta), 900, number, spread=0.5))
        states[name] = bank.state()
    return states


@pytest.fixture(scope="module")
def donors():
    return lent(MODELS)


def others(donors, name):
    return [state for model, state in donors.items() if model != name]


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_is_told_before_its_first_row(name):
    bank = described(name)
    target, features = told(bank), features_of(bank)
    assert {feature.status for feature in features.values()} == {"prior_only"}
    errors = np.array([feature.stderr for feature in features.values()])
    assert (np.abs(coefficients(bank) - beta_of(name)) <= 2.0 * errors).all()
    assert target.champion == "portable"
    assert target.models["portable"].rows == 0
    assert target.interval.p10 < 0.95
    assert target.interval.p90 > 1.05


@pytest.mark.parametrize(
    ("feature_set", "facts"), [("portable", {"model": "m", "gpu": "H100"}), ("physics", CONFIGS["7b"])]
)
def test_without_a_sheet_or_without_portable_nothing_is_told(feature_set, facts):
    bank = Bank(Config(learners=("rls",), feature_sets=(feature_set,)))
    bank.describe("c", facts)
    assert bank.targets("c") == {}


@pytest.mark.parametrize("name", MODELS)
def test_donors_of_other_models_narrow_what_is_told(donors, name):
    banks = [described(name, states) for states in ((), others(donors, name))]
    typical = step_of(beta_of(name), 0.0, 32_000.0, 32.0)
    cold, warm = (abs(typical @ coefficients(bank) / (typical @ beta_of(name)) - 1.0) for bank in banks)
    assert warm < 0.06
    assert warm < cold
    cold, warm = map(features_of, banks)
    assert all(warm[key].stderr <= cold[key].stderr for key in warm)


@pytest.mark.parametrize("name", MODELS)
def test_many_rows_of_one_workload_do_not_split_what_they_never_parted(donors, name):
    """The rows have a misfit that is not in the columns; the own fit puts it on context or requests, with certainty."""
    rows = rows_of(beta_of(name), 3000, 7, spread=0.01)
    requests = rows.raw[:, STEP_FEATURES.index("requests")]
    rows.elapsed_us[:] *= 1.0 + 0.02 * np.sin(requests / 9.0)
    bank = described(name, others(donors, name))
    bank.learn("c", STEP, rows)
    context = features_of(bank)["decode_context_tokens"]
    assert context.vif > 10
    assert context.status != "identified"
    assert abs(context.coefficient - beta_of(name)[2]) < 2.0 * context.stderr
    unseen = step_of(beta_of(name), 0.0, 128 * 1800.0, 128.0)
    assert unseen @ coefficients(bank) == pytest.approx(unseen @ beta_of(name), rel=0.1)


@pytest.mark.parametrize(
    ("speed", "rows"),
    [(1.4, {"spread": 0.5, "prefill": 0.2}), (0.1, {})],
    ids=["that part the costs", "of a machine so fast that the sheet's bounds cannot hold"],
)
def test_the_fit_of_own_rows_stands(speed, rows):
    bank, alone = described("7b"), Bank(PORTABLE)
    alone.describe("c", {"model": "m"})
    for each in (bank, alone):
        each.learn("c", STEP, rows_of(speed * beta_of("7b"), 900, **rows))
    assert features_of(bank) == features_of(alone)


def test_no_row_takes_context_below_its_bandwidth():
    beta = beta_of("7b")
    beta[2] = 0.95 * terms_of(CONFIGS["7b"]).base[2]
    bank = described("7b")
    bank.learn("c", STEP, rows_of(beta, 900))
    assert features_of(bank)["decode_context_tokens"].coefficient >= terms_of(CONFIGS["7b"]).base[2]


def test_an_odd_donor_does_not_vote():
    """Reading context costs it nine times what it costs the others."""
    usual = lent(("7b", "7b-a100", "70b", "70b-tp8"))
    odd = lent(["mixtral"], THETA * np.array([1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0]))
    banks = [described("70b", each.values()) for each in (usual, usual | odd)]
    assert coefficients(banks[1]) == pytest.approx(coefficients(banks[0]), rel=0.1)
    without, beside = map(features_of, banks)
    assert all(beside[name].stderr < 1.5 * without[name].stderr for name in without)


def test_hidden_prefix_hits_leave_prefill_to_the_sheet():
    rows = rows_of(beta_of("7b"), 900)
    rows.raw[:, STEP_FEATURES.index("prefill_tokens")] = 30.0 * rows.raw[:, STEP_FEATURES.index("requests")]
    bank = described("7b", **{HIDES_HITS: True})
    bank.learn("c", STEP, rows)
    prefill = features_of(bank)["prefill_tokens"]
    assert prefill.coefficient == pytest.approx(beta_of("7b")[1])
    assert prefill.status == "prior_only"


def test_a_state_of_the_same_configuration_is_what_it_starts_from(donors):
    bank = Bank(PORTABLE)
    bank.add_donors(donors["70b"])
    bank.describe("70b", CONFIGS["70b"] | {"model": "70b"})
    assert features_of(bank, config_id="70b")["decode_context_tokens"].coefficient == pytest.approx(
        beta_of("70b")[2], rel=0.1
    )


def test_the_first_rows_of_a_cold_server_do_not_drown_the_sheet():
    rows = rows_of(beta_of("7b"), 60)
    rows.elapsed_us[::2] *= 6.0
    bank = described("7b")
    bank.learn("c", STEP, rows)
    typical = np.array([1.0, 0.0, 32_000.0, 32.0])
    assert typical @ coefficients(bank) == pytest.approx(typical @ beta_of("7b"), rel=0.15)


POINTS = ((2.0, 300.0), (16.0, 300.0), (128.0, 300.0), (128.0, 3000.0))
"""Requests of a step, and their context."""
SHORT, LONG, USUAL = np.array([[1.0, 0.0, 600.0, 2.0], [1.0, 0.0, 384_000.0, 128.0], [1.0, 0.0, 22_400.0, 32.0]])


def error_after(moments_s, visit_s, step, beside=None):
    """Relative error of a step's time, or of how two compare, once each point was served around its moment."""
    requests, context = np.repeat(POINTS, 400, axis=0).T
    columns = {"requests": requests, "decode_requests": requests, "decode_tokens": requests}
    us = np.column_stack([np.ones(1600), np.zeros(1600), requests * context, requests]) @ beta_of("7b")
    us *= 1.0 + 0.01 * np.random.default_rng(1).standard_normal(1600)
    rows, bank = of_columns(columns | {"decode_context_tokens": requests * context}, us), described("7b")
    later_s = np.repeat(moments_s, 400) + np.tile(np.linspace(0.0, visit_s, 400), 4)
    rows.end_ns[:] = rows.end_ns[0] + (1e9 * later_s).astype(np.int64)
    bank.learn("c", STEP, rows.take(np.argsort(rows.end_ns, kind="stable")))
    relative = step / (step @ beta_of("7b"))
    if beside is not None:
        relative = relative - beside / (beside @ beta_of("7b"))
    return np.sqrt(relative @ np.array(told(bank).models["portable"].covariance) @ relative)


AT_ONCE, ONE_BY_ONE = [0.0] * 4, [0.0, 300.0, 600.0, 900.0]


def test_minutes_tell_the_level_of_speed_less_surely_than_hours():
    assert error_after(AT_ONCE, 60.0, USUAL) > 2.0 * error_after(AT_ONCE, 3600.0, USUAL)


def test_points_seen_minutes_apart_do_not_tell_how_their_costs_compare():
    """The machine may have been faster at the one than at the other; beside each other it was the same for both."""
    assert error_after(ONE_BY_ONE, 20.0, LONG, SHORT) > 1.8 * error_after(AT_ONCE, 20.0, LONG, SHORT)
    assert error_after(ONE_BY_ONE, 20.0, USUAL) < 0.8 * error_after(AT_ONCE, 20.0, USUAL)


def test_banks_of_two_hours_merge_to_what_one_would_say_of_both():
    rows, (whole, early, late) = rows_of(beta_of("7b"), 1200), (described("7b") for _ in range(3))
    rows.end_ns[500:] += 3600 * 10**9
    for bank, part in ((whole, rows), (early, rows.slice(0, 500)), (late, rows.slice(500, 1200))):
        bank.learn("c", STEP, part)
    early.merge(late)
    assert coefficients(early) == pytest.approx(coefficients(whole), rel=0.01)
    merged, expected = features_of(early), features_of(whole)
    assert [merged[name].stderr for name in expected] == pytest.approx([f.stderr for f in expected.values()], rel=0.05)
