"""The verdict: what every report says of a configuration, from one place."""

import pytest

from tests.tracefit.example_snapshot import config_of, tree

NOW = 1_763_625_600_000_000_000
MINUTE_NS = 60 * 10**9


def verdict_of(step=None, **config):
    """Of the example with these keys of the configuration, and of its step time."""
    changed = tree()
    changed["configs"][0] |= config
    changed["configs"][0]["targets"].get("step_time", {}).update(step or {})
    return config_of(changed).verdict


def test_what_may_be_used_says_so_with_its_error_and_what_was_seen():
    verdict = verdict_of()
    assert (verdict.usable, verdict.state, verdict.reasons) == (True, "usable", ())
    assert 0.0 < verdict.error < 0.25
    assert verdict.rows >= 256
    assert verdict.seen["requests"][1] > verdict.seen["requests"][0]
    assert verdict.problems(NOW) == ()


@pytest.mark.parametrize(("telemetry", "rows_min"), [("steps", 256), ("requests", 256), ("metrics", 64)])
def test_what_is_young_is_not_usable_yet_and_no_problem(telemetry, rows_min):
    young = tree()["configs"][0]["targets"]["step_time"]["models"]
    young["portable"]["rows"] = rows_min - 1
    verdict = verdict_of({"models": young}, telemetry=telemetry)
    assert verdict.state == "not usable yet"
    assert verdict.reasons == (f"learned from {rows_min - 1} rows, fewer than {rows_min}",)
    assert verdict.problems(NOW) == ()
    young["portable"]["rows"] = rows_min
    assert verdict_of({"models": young}, telemetry=telemetry).usable


def test_a_learner_that_failed_is_a_defect():
    verdict = verdict_of(quarantined="step_time: ValueError", targets={})
    assert (verdict.usable, verdict.state, verdict.error) == (False, "quarantined", None)
    assert verdict.problems(NOW) == (("quarantined, its learner failed", True, ""),)


def test_a_doubt_is_a_reason_and_a_problem():
    verdict = verdict_of(doubts=["its engines disagree"])
    assert (verdict.state, verdict.reasons) == ("not usable", ("its engines disagree",))
    assert verdict.problems(NOW)[0].text == "not usable: its engines disagree"


@pytest.mark.parametrize(
    ("moved", "words", "term"),
    [
        ({}, "steps take 1.42 × as long", ": no single term is sure"),
        ({"term": "prefill_tokens"}, "steps with prefill take 1.42 × as long", ": prefill, by its tokens"),
        (
            {"term": "intercept", "added": 30_800.0},
            "steps take 1.42 × as long",
            ": every step by the same time (+30.8 ms)",
        ),
        (
            {"term": "decode", "added": 2.3, "last_within_s": 75.0},
            "steps take 1.42 × as long",
            " ± 2 min: decode, not prefill (+230%)",
        ),
        (
            {"term": "decode_context_tokens", "added": -0.12},
            "steps take 1.42 × as long",
            ": decode, by its context (-0.12 µs per token)",
        ),
    ],
)
def test_a_change_of_speed_is_a_problem_for_a_day_and_names_the_term_where_it_is_told(moved, words, term):
    since = NOW - 60 * MINUTE_NS
    drift = {"last_unix_nano": since, "gain": 1.42, "count": 1, **moved}
    verdict = verdict_of({"drift": drift})
    assert [each.text for each in verdict.problems(NOW)] == [f"{words} since 07:00 UTC{term}"]
    assert verdict.change.text(NOW + 23 * 60 * MINUTE_NS) == f"{words} since 2025-11-20 07:00 UTC{term}"
    assert verdict.problems(NOW + 24 * 60 * MINUTE_NS) == ()
    assert verdict_of({"drift": drift}, replaced_by="abc").problems(NOW) == (), "its server sends another one now"


def test_who_was_not_heard_of_for_ten_minutes_is_silent_since_then():
    verdict = verdict_of(last_heard_unix_nano=NOW)
    assert verdict.silent_since(NOW + 9 * MINUTE_NS) == 0
    assert verdict.silent_since(NOW + 11 * MINUTE_NS) == NOW
    assert verdict_of(last_heard_unix_nano=NOW, replaced_by="abc").silent_since(NOW) == NOW
    assert verdict_of().silent_since(NOW) == 0, "of a recording, nobody knows"


def test_the_last_row_is_the_newest_of_both_phases():
    level = {"decode": {"factor": 1.0, "last_row_unix_nano": NOW}, "prefill": {"factor": 1.1, "last_row_unix_nano": 5}}
    assert verdict_of({"level": level}).last_row_unix_nano == NOW


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"telemetry": "sampled"}, "steps are sampled"),
        ({"telemetry": "requests"}, "no steps"),
        ({"prefix_hits_hidden": True}, "prefix-cache hits are hidden"),
    ],
)
def test_what_telemetry_hides_or_samples_is_said(config, said):
    assert said in " ".join(verdict_of(**config).hidden)
    assert verdict_of(telemetry="steps+").hidden == ()
