"""What the bank promises whatever comes in."""

import dataclasses
import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collector.config import Config
from online import STEP_FEATURES, Bank, RowBlock, RowOutcome, Target
from tests.support.banks import RLS, features_of, learned, restarted
from tests.support.linear_steps import steps


@settings(max_examples=settings.default.max_examples // 4)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_call_sizes_do_not_matter(seed, cuts):
    rows = steps(700, seed, stalls=0.01).rows
    rows.end_ns[::7] -= 200_000_000  # of another engine, whose exports come later
    edges = [0, *np.cumsum(np.resize(cuts, 700)).clip(max=700).tolist()]
    parts = [rows.slice(start, stop) for start, stop in itertools.pairwise(edges) if start < stop]
    whole, parts = learned(rows, settings=Config()), learned(*parts, settings=Config())
    assert msgspec.json.encode(whole.targets("c")) == msgspec.json.encode(parts.targets("c"))
    assert whole.history("c") == parts.history("c")


@pytest.fixture(scope="module")
def known():
    """The state of a bank that has learned some rows."""
    return learned(steps(300, 1).rows).state()


_ODD = st.sampled_from([0.0, -1.0, np.nan, np.inf, -np.inf, 1e300, 1e-300, -1e300, 1.0, 1e6])


@settings(max_examples=settings.default.max_examples // 2)
@given(data=st.data())
def test_every_row_received_has_one_outcome_and_nothing_non_finite_comes_out(known, data):
    n = data.draw(st.integers(1, 80))
    sane = steps(n, data.draw(st.integers(0, 999))).rows
    raw, y, weight = sane.raw.copy(), sane.elapsed_us.copy(), sane.weight.copy()
    for _ in range(data.draw(st.integers(0, 20))):
        i = data.draw(st.integers(0, n - 1))
        where = data.draw(st.sampled_from(["raw", "y", "weight"]))
        value = data.draw(_ODD)
        if where == "raw":
            raw[i, data.draw(st.integers(0, len(STEP_FEATURES) - 1))] = value
        else:
            (y if where == "y" else weight)[i] = value
    bad = dataclasses.replace(sane, raw=raw, elapsed_us=y, weight=weight)
    bank = Bank(RLS)
    bank.restore(known)
    outcome = bank.learn("c", Target.STEP_TIME, bad)
    assert sum(outcome.values()) == n
    assert set(outcome) <= set(RowOutcome)
    published = msgspec.json.encode(bank.targets("c"))
    assert msgspec.json.encode(restarted(bank).targets("c")) == published
    assert b"null" not in published.replace(b'"last_unix_nano":null', b"").replace(b'"gain":null', b"")


def test_a_feature_nobody_has_seen_is_absent():
    assert "prefill_tokens" not in features_of(learned(steps(400, 5, prefill_share=0.0).rows))


def test_living_configurations_are_not_forgotten_for_newcomers():
    bank = Bank(Config(learners=("rls",), engines_max=2))

    def learn(name, at_s):
        rows = steps(40, 1).rows
        rows = dataclasses.replace(rows, end_ns=rows.end_ns - rows.end_ns.max() + int(at_s * 1e9))
        return {outcome.value for outcome in bank.learn(name, Target.STEP_TIME, rows)}

    hour_s = 3600
    assert [learn(name, 10 * hour_s) for name in ("a", "b")] == [{"learned"}] * 2
    assert [learn("c", (10 + at) * hour_s) for at in (0, 0.9)] == [{"limit_exceeded"}] * 2
    assert (bank.configs(), [*bank.refused]) == (["a", "b"], ["c"])
    assert learn("b", 10.9 * hour_s) == {"learned"}
    assert learn("c", 11.1 * hour_s) == {"learned"}, "a has been silent for an hour"
    assert (bank.configs(), [*bank.refused]) == (["b", "c"], [])
    assert learn("a", 11.2 * hour_s) == {"limit_exceeded"}


def refused_row(bank, name):
    row = steps(1, 1).rows
    outcome = bank.learn(name, Target.STEP_TIME, dataclasses.replace(row, elapsed_us=np.zeros(1)), {0: "engine"})
    assert (outcome, bank.lineages) == ({RowOutcome.NOT_POSITIVE: 1}, {})


def test_who_sent_no_row_that_could_be_learned_holds_its_place_no_longer_than_others():
    bank, hour_ns = Bank(Config(learners=("rls",), engines_max=1)), 3600 * 10**9
    refused_row(bank, "silent")
    rows = steps(40, 1).rows
    for later_ns, outcome in ((hour_ns // 2, RowOutcome.LIMIT_EXCEEDED), (2 * hour_ns, RowOutcome.LEARNED)):
        later = dataclasses.replace(rows, end_ns=rows.end_ns + later_ns)
        assert bank.learn("c", Target.STEP_TIME, later) == {outcome: 40}
    assert bank.configs() == ["c"]


def test_rename_keeps_what_was_learned():
    bank = learned(steps(300, 1).rows)
    before = msgspec.json.encode(bank.targets("c"))
    bank.rename("c", "new")
    assert bank.configs() == ["new"]
    assert msgspec.json.encode(bank.targets("new")) == before


@pytest.mark.parametrize(
    ("settings_", "key"),
    [
        (Config(learners=("river:no.Such",)), "river:no.Such"),
        (Config(learners=("river:linear_model.PARegressor", "river:residual")), "rls is not among them"),
        (Config(learners=("river:drift.ADWIN",)), "not a regressor"),
        (Config(custom={"step_time": ("tokens",)}), "tokens"),
        (Config(detector="kswin"), "detector: 'kswin' is not one of cusum"),
    ],
)
def test_bad_settings_are_refused_by_name(settings_, key):
    with pytest.raises(ValueError, match=key):
        Bank(settings_)


@pytest.mark.parametrize("target", list(Target))
def test_every_target_learns(target):
    rng = np.random.default_rng(4)
    raw = rng.uniform(1, 50, size=(300, len(target.vocabulary)))
    rows = RowBlock.of_lines(raw, 1000 + raw[:, 0] * 10 + rng.normal(0, 5, 300), end_ns=np.arange(300) * 10**7)
    bank = Bank(Config())
    assert bank.learn("c", target, rows) == Counter({RowOutcome.LEARNED: 300})
    snapshot = bank.targets("c")[target.value]
    assert snapshot.vector == target.vector
    assert snapshot.models["portable"].features
    assert (snapshot.correction is not None) == (target is Target.STEP_TIME)


def test_descriptions_without_rows_are_bounded():
    bank = Bank(Config(learners=("rls",), engines_max=3))
    bank.learn("learned", Target.STEP_TIME, steps(40, 1).rows)
    bank.describe("learned", {"gpu": "H100"})
    for i in range(100):
        bank.describe(f"idle{i}", {"gpu": "H100"})
    kept = [name for name in ("learned", *(f"idle{i}" for i in range(100))) if bank.facts(name)]
    assert kept == ["learned", "idle97", "idle98", "idle99"]
