"""One battery for every learner; a new one is tested by being listed."""

import copy
import dataclasses
import re
from itertools import product

import msgspec
import numpy as np
import pytest

from collector.config import Config
from online import STEP_FEATURES, RowOutcome
from online.blocks import Design
from online.features import portable
from online.target import TargetState
from tests.support.banks import STEP, coefficients, learned, restarted, told
from tests.support.configurations import CONFIGS
from tests.support.linear_steps import BETA, NAMES, steps

LEARNERS = (
    "rls",
    "river:tree.HoeffdingTreeRegressor",
    "river:linear_model.PARegressor",
)
SAVED = LEARNERS[:1]


def _settings(learner, **settings):
    return Config(learners=tuple(dict.fromkeys(("rls", learner))), **settings)


def _bank(learner, *rows, **settings):
    return learned(*rows, settings=_settings(learner, **settings))


def _model(bank, learner):
    key = "portable" if learner == "rls" else f"{learner}/portable"
    target = bank.targets("c").get("step_time")
    return None if target is None else target.models.get(key)


def _fresh(learner, features):
    state = TargetState(STEP, _settings(learner))
    state.add_features(features)
    return [*state.models.values(), *state.river.values()][-1]


def _published(bank):
    return msgspec.json.encode(bank.targets("c"))


def _all_finite(bank):
    return not re.search(r"\b(nan|inf)\b", repr(bank.targets("c")))


def _changed(rows, y=np.copy, **columns):
    raw = rows.raw.copy()
    for name, change in columns.items():
        raw[:, STEP_FEATURES.index(name)] = change(raw[:, STEP_FEATURES.index(name)])
    return dataclasses.replace(rows, raw=raw, elapsed_us=y(rows.elapsed_us))


@pytest.fixture(params=LEARNERS)
def learner(request):
    return request.param


def test_learns_to_predict(learner):
    bank = _bank(learner, steps(3000, 1, prefill_share=0.1).rows)
    assert _model(bank, learner).error.median_ape < (0.02 if learner.startswith("rls") else 0.2)


def test_inputs_are_left_as_they_are(learner):
    rows = steps(200, 2).rows
    before = copy.deepcopy(rows)
    _bank(learner, rows)
    for field in dataclasses.fields(rows):
        np.testing.assert_array_equal(getattr(rows, field.name), getattr(before, field.name))


def test_equal_rows_give_equal_bytes(learner):
    one, other = (_bank(learner, steps(600, 3, stalls=0.01).rows) for _ in range(2))
    assert _published(one) == _published(other)


BAD = [
    *product(["y"], [np.nan, np.inf, -np.inf, 0.0, -5.0, 1e300, 1e-300]),
    *product(["requests"], [np.nan, np.inf, -np.inf, 1e300, -1e300]),
]


def test_learns_nothing_from_a_time_or_a_feature_that_is_none(learner):
    clean, dirty = (_bank(learner, steps(400, 4).rows) for _ in range(2))
    for column, bad in BAD:
        # few enough that it is not the clock that is too coarse (online/target/target_state.py)
        rows = _changed(steps(4, 5).rows, **{column: lambda old, bad=bad: np.full_like(old, bad)})
        outcome = dirty.learn("c", STEP, rows)
        assert outcome[RowOutcome.LEARNED] == 0, (column, bad)
        assert sum(outcome.values()) == 4
        assert _published(dirty) == _published(clean), (column, bad)


ODD = {
    "features of 0": dict.fromkeys(NAMES[1:], np.zeros_like),
    "features of 1e-300": {name: lambda x: np.full_like(x, 1e-300) for name in NAMES[1:]},
    "features of 1e-150": {"requests": lambda x: x * 1e-150},
    "features of 1e11": {"requests": lambda x: x * 1e9},
    "negative features": {"requests": np.negative},
    "a constant feature": {"requests": lambda x: np.full_like(x, 7.0)},
    "a feature that appears late": {"prefill_tokens": lambda x: np.where(np.arange(len(x)) < 300, 0.0, x)},
    "a time that jumps by 10^6": {"y": lambda y: np.where(np.arange(len(y)) < 300, y, y * 1e6)},
    "a time that falls by 10^6": {"y": lambda y: np.where(np.arange(len(y)) < 300, y, y * 1e-6)},
    "a time that is constant": {"y": lambda y: np.full_like(y, 1e4)},
}


STREAMS = {name: _changed(steps(500, 6).rows, **changes) for name, changes in ODD.items()}
STREAMS["equal rows"] = steps(10, 7).rows.take(np.zeros(400, np.intp))
STREAMS |= {f"{n} rows": steps(n, 8).rows for n in (1, 2, 3, 5)}


@pytest.mark.parametrize("odd", STREAMS)
def test_odd_rows_leave_everything_finite(learner, odd):
    """Of every set that has columns of its own, relevance included."""
    bank = _bank(learner, feature_sets=("portable", "physics", "bsr_ard"))
    bank.describe("c", CONFIGS["mixtral"])
    outcome = bank.learn("c", STEP, STREAMS[odd])
    assert sum(outcome.values()) == len(STREAMS[odd])
    assert _all_finite(bank)


def test_a_copied_feature_shares_the_coefficient_and_harms_no_prediction(learner):
    rows = steps(2000, 9).rows
    rows.raw[:, STEP_FEATURES.index("running")] = rows.raw[:, STEP_FEATURES.index("requests")]
    bank = _bank(learner, rows, feature_sets=("custom",), custom={"step_time": (*NAMES, "running")})
    assert _all_finite(bank)
    if learner == "rls":
        model = told(bank).models["custom"]
        found = {f.name: f.coefficient for f in model.features}
        assert found["requests"] + found["running"] == pytest.approx(BETA[3], rel=0.05)
        assert model.error.mape < 0.02


def test_a_learner_says_what_it_reads_and_is_saved_where_it_publishes_coefficients(learner):
    features = portable(STEP)
    design = Design.of(features, steps(600, 12).rows)
    model = _fresh(learner, features)
    assert model.features is features
    assert not model.started
    assert model.snapshot() is None
    model.learn(design)
    assert model.started
    if learner in SAVED:
        assert np.isfinite(model.predict(design)).all()
        bank = _bank(learner, steps(600, 12).rows)
        assert _model(restarted(bank), learner) == _model(bank, learner)


@pytest.mark.parametrize("learner", SAVED)
def test_memory_reaches_a_plateau(learner):
    bank, sizes = _bank(learner), []
    for seed in range(6):
        bank.learn("c", STEP, steps(1500, 20 + seed).rows)
        sizes.append(len(bank.state()))
    assert sizes[-1] < 1.3 * sizes[1]


def test_the_order_of_the_features_does_not_matter():
    forth, back = (
        _bank("rls", steps(1500, 11).rows, feature_sets=("custom",), custom={"step_time": names})
        for names in (NAMES, NAMES[::-1])
    )
    assert coefficients(forth, name="custom") == pytest.approx(coefficients(back, name="custom")[::-1], rel=1e-6)
