"""Predicting each step before it is learned: by hand on small streams, and as people call it on a file of passes."""

import json

import numpy as np
import pytest

from collector.cli import main
from collector.evaluate.captures import Capture, Delivered
from collector.evaluate.online import GRID, GridRegression, predict_then_learn
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.gpu_server import serve
from tests.support.vllm_senders import fpm_lines, write_lines


def test_a_plane_is_found_again_and_a_slope_below_zero_is_left_out():
    plane = GridRegression()
    for a in range(3):
        for m in range(3):
            plane.learn(np.array([a, m], float), 20.0 - 2.0 * a + 3.0 * m)
    assert plane.predict(np.array([100.0, 4.0])) == pytest.approx(30.0)


def test_nothing_is_said_before_five_rows_that_vary():
    plane = GridRegression()
    for _ in range(10):
        plane.learn(np.array([1.0, 1.0]), 5.0)
    assert np.isnan(plane.predict(np.array([1.0, 1.0])))
    plane.learn(np.array([2.0, 1.0]), 7.0)
    assert plane.predict(np.array([3.0, 1.0])) == pytest.approx(9.0)


def test_what_is_rare_is_kept_while_what_is_usual_makes_room():
    plane = GridRegression()
    plane.learn(np.array([1e6, 1e3]), 1e6 + 5.0)
    for number in range(1000):
        plane.learn(np.array([1.0 + number % 7, 1.0]), 6.0 + number % 7)
    assert plane.predict(np.array([5e5, 500.0])) == pytest.approx(5e5 + 5.0, rel=1e-3)


def _capture(name, elapsed_us):
    raw = np.zeros((len(elapsed_us), len(STEP_FEATURES)))
    raw[:, STEP_FEATURES.index("decode_requests")] = np.arange(len(elapsed_us)) % 5 + 1.0
    rows = RowBlock.of_lines(raw, np.asarray(elapsed_us, float), end_ns=np.arange(len(elapsed_us)) * 10**6)
    full = {Target.STEP_TIME: Delivered(rows, rows.end_ns, np.zeros(len(rows), np.int64))}
    return Capture(name, name, {}, "steps", full, {}, [], 0)


def test_each_recording_counts_once_in_macro_and_each_step_in_micro():
    loads = np.arange(1000) % 5 + 1.0
    truth = 1000.0 + 100.0 * loads
    jump = truth[:100].copy()
    jump[-50:] *= 2.0
    report = predict_then_learn([_capture("calm", truth), _capture("jumps", jump)], "1", lambda *_: None)
    calm, jumps, macro, micro = (
        next(score for score in scores if score["model"] == GRID)
        for scores in (*(case.scores for case in report.cases), report.macro, report.micro)
    )
    assert calm["mape"] == pytest.approx(0.0, abs=1e-6)
    assert (calm["missing"], jumps["missing"]) == pytest.approx((0.005, 0.05))
    assert jumps["mape"] > 0.05
    assert macro["mape"] == pytest.approx((calm["mape"] + jumps["mape"]) / 2)
    assert micro["mape"] == pytest.approx((995 * calm["mape"] + 95 * jumps["mape"]) / 1090)
    assert jumps["last"] > jumps["mape"] / 2


def test_a_file_of_forward_passes_is_scored_from_its_first_pass_on(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRACEFIT_CONFIG", raising=False)
    path = write_lines(tmp_path / "passes.jsonl.gz", fpm_lines(serve("llama8b-h100", 60.0, 11)))
    out = tmp_path / "report.json"
    assert main(["lab", "evaluate", str(path), "--protocol", "predict-then-learn", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "macro" in printed
    assert "micro" in printed
    (case,) = json.loads(out.read_text())["cases"]
    found = {score["model"]: score for score in case["scores"]}
    assert found["tracefit"]["mape"] < found[GRID]["mape"] < 0.5
    assert found[GRID]["missing"] < 0.05
    assert main(["lab", "evaluate", str(path), "--systems", "portable"]) == 0
    assert "telemetry=fpm" in capsys.readouterr().out
