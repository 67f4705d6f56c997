"""Evaluation: scores by hand, the protocol on small simulated captures, a report that holds what it says."""

import numpy as np
import pytest

from collector.evaluate.captures import REQUEST, Capture
from collector.evaluate.command import lines
from collector.evaluate.protocol import covered, evaluate, request_scores, time_in_rows
from collector.evaluate.systems import ape, fit
from online.features.systems import PHYSICS
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.configurations import CONFIGS, rows_of

MS = 1_000_000
STEP = Target.STEP_TIME


def requests_of(*stamps_ms, tokens=3):
    """Requests of ten prompt tokens; stamps are in milliseconds."""
    table = np.zeros(len(stamps_ms), REQUEST)
    for request, stamps in zip(table, stamps_ms, strict=True):
        request["prompt_tokens"], request["output_tokens"] = 10, tokens
        for name, at in stamps.items():
            request[f"{name}_ns"] = at * MS
    return table


def test_scores_of_requests_are_those_by_hand():
    us = np.array([10e3, 20e3, 30e3, 40e3])
    rows = RowBlock.of_lines(np.ones((4, len(STEP_FEATURES))), us, end_ns=np.cumsum(us * 1000).astype(np.int64))
    whole = {"arrived": 5, "queued": 8, "scheduled": 10, "first_token": 30, "finished": 100, "departed": 104}
    requests = covered(rows, requests_of(whole, whole | {"finished": 110}))
    found = request_scores(requests, *time_in_rows(rows, us * 1.1, requests), {})
    assert set(found) == {"e2e", "ttft", "itl", "p99"}
    assert list(found.values()) == pytest.approx([0.1] * 4)
    alphas = {Target.API_QUEUEING: np.array([3000.0]), Target.POST_DECODE: np.array([4000.0])}
    found = request_scores(requests, *time_in_rows(rows, us, requests), alphas)
    assert (found["e2e_full"], found["ttft"]) == pytest.approx((0.0, 0.0))


def capture_of(name, seed=0):
    n = 600
    rows, _ = rows_of(PHYSICS, name, n, seed)
    cut, ends = int(0.6 * n), rows.end_ns / MS
    stamps = [
        {"queued": ends[at], "scheduled": ends[at], "first_token": ends[at + 1], "finished": ends[at + 30]}
        for at in range(5, n - 40, 17)
    ]
    requests = requests_of(*stamps, tokens=30)
    return Capture(name, dict(CONFIGS[name]), "steps", {STEP: rows}, requests, int(rows.end_ns[cut]))


@pytest.fixture(scope="module")
def report():
    captures = [capture_of("7b"), capture_of("mixtral", seed=2)]
    return evaluate(captures, ("portable", "physics", "blackbox"), left_out="model")


def test_the_system_that_is_the_truth_wins(report):
    for capture in report["captures"]:
        assert capture["scored_rows"] == 239
        assert capture["scored_requests"] > 10
        found = {score["system"]: score for score in capture["scores"]}
        assert list(found) == ["portable", "physics", "blackbox"]
        assert found["physics"]["step_mape"] < 0.02 < found["blackbox"]["step_mape"]
        assert found["physics"]["e2e"] < 0.01
        assert 0.6 < found["physics"]["coverage"] < 0.95


def test_what_others_learned_transfers(report):
    for transfers in report["transfers"].values():
        found = {each["system"]: each for each in transfers}
        assert found["physics"]["donors"] == 1
        assert found["physics"]["after"]["20"] < 0.1
        assert found["portable"]["zero_shot"] < 0.5
        assert found["portable"]["after"]["100"] <= found["portable"]["cold"]["100"] + 0.01
        assert list(found) == ["portable", "physics", "blackbox"], "the systems that were asked for"


def test_a_residual_tree_learns_what_no_line_through_the_columns_follows():
    rows, _ = rows_of(PHYSICS, "7b", 10_000)
    rows.elapsed_us[rows.raw[:, STEP_FEATURES.index("requests")] > 30] *= 1.5
    learned, scored = rows.slice(0, 8000), rows.slice(8000, 10_000)
    plain, tree = (fit(name, STEP, CONFIGS["7b"], learned).predict(scored) for name in ("portable", "portable × tree"))
    assert ape(tree, scored.elapsed_us).mean() < 0.5 * ape(plain, scored.elapsed_us).mean()


def test_a_capture_without_steps_is_reported_and_not_scored():
    capture = capture_of("7b")
    capture.rows, capture.requests = {}, requests_of()
    found = evaluate([capture], ("portable",))
    assert found["captures"][0]["scores"] == []
    assert "nothing to score" in "\n".join(lines(found))
