"""Two snapshots: what moved, by how many standard errors, and what it does to a typical step."""

import math

import pytest

import tracefit
from tests.tracefit.example_snapshot import encoded, tree

BEFORE = tracefit.load(encoded())


def after(edit):
    bent = tree()
    edit(bent["configs"])
    return tracefit.load(encoded(bent))


def features_in(configs):
    return configs[0]["targets"]["step_time"]["models"]["portable"]["features"]


def intercept(configs):
    return features_in(configs)[0]


def test_a_snapshot_does_not_differ_from_itself():
    diff = BEFORE.diff(BEFORE)
    assert [move for each in diff.configs for move in each.moves if move.moved or move.standard_errors] == []
    assert diff.configs[0].step.before_us == diff.configs[0].step.after_us


def test_a_moved_coefficient_is_told_in_standard_errors_and_in_time():
    diff = BEFORE.diff(after(lambda configs: intercept(configs).update(coefficient=8_400.0, stderr=30.0)))
    (config,) = diff.configs
    (moved,) = [each for each in config.moves if each.moved]
    assert (moved.target, moved.feature, moved.before, moved.after) == ("step_time", "intercept", 7_900.0, 8_400.0)
    assert moved.standard_errors == pytest.approx(500 / math.hypot(40, 30))
    assert config.step.after_us - config.step.before_us == pytest.approx(500)


@pytest.mark.parametrize(
    ("factors", "term"),
    [
        ((1.4, 1.4, 1.4, 1.4), "all"),
        ((1.4, 1.0, 1.4, 1.4), "decode"),
        ((1.4, 1.0, 1.2, 1.2), "not_prefill"),
        ((1.0, 1.0, 1.4, 1.0), "decode_context_tokens"),
    ],
)
def test_the_one_term_that_explains_what_moved_is_named(factors, term):
    def slower(configs):
        for feature, factor in zip(features_in(configs), factors, strict=True):
            feature |= {"coefficient": factor * feature["coefficient"]}

    (config,) = BEFORE.diff(after(slower)).configs
    assert config.term == term


def test_prefill_is_not_said_to_be_as_it_was_where_that_is_not_known():
    def slower(configs):
        step_time = configs[0]["targets"]["step_time"]["models"]["portable"]
        step_time.pop("covariance", None)
        for feature in features_in(configs):
            feature["coefficient"] *= 1.4
            feature["stderr"] *= 1000.0 if feature["name"] == "prefill_tokens" else 1.0

    (config,) = BEFORE.diff(after(slower)).configs
    assert config.term == ""


def test_no_term_that_explains_nothing_is_named():
    def other(configs):
        for feature, factor in zip(features_in(configs), (2.3, 39.0, 50.0, 77.0), strict=True):
            feature |= {"coefficient": factor * feature["coefficient"]}

    (config,) = BEFORE.diff(after(other)).configs
    assert (config.term, config.added) == ("", None)


def test_without_a_standard_error_nothing_is_said_to_have_moved():
    diff = BEFORE.diff(after(lambda configs: intercept(configs).update(coefficient=9_000.0, stderr=None)))
    (move,) = [each for each in diff.configs[0].moves if each.after != each.before]
    assert move.standard_errors is None
    assert not move.moved


def test_a_new_version_of_vllm_is_the_same_machine():
    def renamed(configs):
        configs[0]["config_id"] = "ffff00000000"
        configs[0]["config"]["vllm_version"] = "0.33.0"
        configs.append({**tree()["configs"][0], "config_id": "aaaa", "config": {"model": "other"}})

    diff = BEFORE.diff(after(renamed))
    assert [(each.before_id, each.after_id) for each in diff.configs] == [("0f3c5a9b77e1", "ffff00000000")]
    assert diff.only_before == ()
    assert diff.only_after == ("aaaa",)


def test_what_cannot_predict_is_compared_without_a_step():
    diff = BEFORE.diff(after(lambda configs: configs[0].update(quarantined="ValueError")))
    assert diff.configs[0].step is None
    assert diff.configs[0].moves
