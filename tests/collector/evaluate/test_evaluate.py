"""Evaluation: paths by time, scores by hand, protocol on a small simulated capture, report that holds what it says."""

import msgspec
import numpy as np
import pytest

from collector.evaluate.captures import Capture, Delivered, Request
from collector.evaluate.command import lines
from collector.evaluate.protocol import Report, evaluate, paths_of, request_scores
from collector.evaluate.systems import NINE, ape, fit
from online.features.systems import PHYSICS
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.configurations import CONFIGS, rows_of

MS = 1_000_000
STEP = Target.STEP_TIME


def _rows(elapsed_ms):
    raw, elapsed_us = np.ones((len(elapsed_ms), len(STEP_FEATURES))), np.array(elapsed_ms) * 1e3
    return RowBlock.of_lines(raw, elapsed_us, end_ns=np.cumsum(np.array(elapsed_ms) * MS))


def served(tokens, **stamps_ms):
    """A request of ten prompt tokens, delivered when it was finished; stamps are in milliseconds."""
    stamps = {name: int(at * MS) for name, at in ({"queued_ns": 0} | stamps_ms).items()}
    return Request(prompt_tokens=10, output_tokens=tokens, delivered_ns=stamps["finished_ns"], **stamps)


def test_request_scores_by_hand():
    rows = _rows([10, 20, 30, 40])
    paths, _ = paths_of(rows, [served(3, scheduled_ns=10, first_token_ns=30, finished_ns=100)])
    found = request_scores(paths, rows.elapsed_us * 1.1, {})
    for name in ("e2e", "gpu_time_mape", "ttft", "itl", "p99"):
        assert found[name] == pytest.approx(0.1), name
    assert "e2e_full" not in found


def test_the_full_time_adds_alphas_and_the_observed_wait():
    rows = _rows([10, 20, 30, 40])
    stamps = {"arrived": 5, "queued": 8, "scheduled": 10, "first_token": 30, "finished": 100, "departed": 104}
    paths, _ = paths_of(rows, [served(3, **{f"{name}_ns": at for name, at in stamps.items()})])
    alphas = {Target.API_QUEUEING: np.array([3000.0]), Target.POST_DECODE: np.array([4000.0])}
    found = request_scores(paths, rows.elapsed_us, alphas)
    assert found["e2e_full"] == pytest.approx(0.0)
    assert found["ttft"] == pytest.approx(0.0)


def _capture(name, system=PHYSICS, n=600, seed=0):
    rows, _ = rows_of(system, name, n, seed)
    delivered = rows.end_ns.copy()
    cut_ns = int(delivered[int(0.6 * n)])
    requests = []
    ends = rows.end_ns
    for first in range(5, n - 40, 17):
        start, token, end = (ends[first + more] / MS for more in (0, 1, 30))
        requests.append(served(30, queued_ns=start, scheduled_ns=start, first_token_ns=token, finished_ns=end))
    return Capture(
        name=name,
        config_id=name,
        facts=dict(CONFIGS[name]),
        telemetry="steps",
        full={STEP: Delivered(rows, delivered, np.zeros(n, np.int64))},
        learned={STEP: rows.slice(0, int(0.6 * n))},
        requests=requests,
        cut_ns=cut_ns,
    )


@pytest.fixture(scope="module")
def report():
    captures = [_capture("7b"), _capture("mixtral", seed=2)]
    return evaluate(captures, NINE, learn_until=0.6, left_out="config", version="1", tell=str)


def test_all_nine_systems_are_scored_on_every_capture(report):
    for capture in report.captures:
        assert [score["system"] for score in capture.scores] == list(NINE)
        assert capture.scored_rows == 239
        assert capture.scored_requests > 10


def test_the_system_that_is_the_truth_wins(report):
    for capture in report.captures:
        found = {score["system"]: score for score in capture.scores}
        assert found["physics"]["step_mape"] < 0.02
        assert found["physics"]["e2e"] < 0.01
        assert found["physics"]["step_mape"] < found["blackbox"]["step_mape"]
        assert 0.6 < found["physics"]["coverage"] < 0.95
        assert found["physics"]["prequential_mape"] < 0.03


def test_a_residual_tree_learns_what_no_line_through_the_columns_follows():
    rows, _ = rows_of(PHYSICS, "7b", 10_000)
    rows.elapsed_us[rows.raw[:, STEP_FEATURES.index("requests")] > 30] *= 1.5
    learned, scored = rows.slice(0, 8000), rows.slice(8000, 10_000)
    plain, tree = (fit(name, STEP, CONFIGS["7b"], learned).predict(scored) for name in ("portable", "portable × tree"))
    assert ape(tree, scored.elapsed_us).mean() < 0.5 * ape(plain, scored.elapsed_us).mean()


def test_what_others_learned_transfers(report):
    for transfers in report.transfers.values():
        found = {(t.system, t.variant): t for t in transfers}
        assert found["physics", "prior"].donors == 1
        assert found["physics", "prior"].after["20"] < 0.1
        assert ("hfd_tl", "frozen") in found
        assert found["portable", "sheet"].zero_shot < 0.5
        assert found["portable", "sheet"].after["100"] <= found["portable", "sheet"].cold["100"] + 0.01
        assert ("bsr_ard", "bias and scale") in found
        assert any(system == "rece" and "specialists" in variant for system, variant in found)


def test_the_report_is_the_same_twice_and_reads_back(report):
    once, again = (
        evaluate([_capture("7b")], NINE[:3], learn_until=0.6, left_out="config", version="1", tell=str)
        for _ in range(2)
    )
    assert msgspec.json.encode(once) == msgspec.json.encode(again)
    data = msgspec.json.encode(report)
    assert msgspec.json.decode(data, type=Report) == report
    assert "NaN" not in data.decode()


def test_a_capture_without_steps_is_reported_and_not_scored():
    capture = _capture("7b")
    capture.full, capture.learned, capture.requests = {}, {}, []
    found = evaluate([capture], NINE, learn_until=0.6, left_out="workload", version="1", tell=str)
    assert found.captures[0].scores == []
    assert "nothing to score" in "\n".join(lines(found))


def test_true_step_times_beside_a_recording_are_what_is_scored():
    capture = _capture("7b")
    full = capture.full[STEP]
    full.step_id[:] = np.arange(len(full.step_id))
    capture.truth_us = {i: 2.0 * float(y) for i, y in enumerate(full.rows.elapsed_us)}
    assert capture.scored(STEP).elapsed_us == pytest.approx(2.0 * full.rows.elapsed_us[361:])
