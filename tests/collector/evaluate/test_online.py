"""Predicting each step before it is learned: on small streams, and as people call it on a file of passes."""

import json

import numpy as np
import pytest

from collector.cli import main
from collector.evaluate.captures import Capture
from collector.evaluate.online import TRACEFIT, predict_then_learn
from online.rows import STEP_FEATURES, RowBlock, Target
from tests.support.gpu_server import serve
from tests.support.vllm_senders import fpm_lines, write_lines


def _capture(name, elapsed_us):
    raw = np.zeros((len(elapsed_us), len(STEP_FEATURES)))
    for column in ("requests", "decode_requests"):
        raw[:, STEP_FEATURES.index(column)] = np.arange(len(elapsed_us)) % 5 + 1.0
    rows = RowBlock.of_lines(raw, elapsed_us, end_ns=np.arange(len(elapsed_us)) * 10**6)
    return Capture(name, {}, "steps", {Target.STEP_TIME: rows}, [], 0)


def test_each_recording_counts_once_in_macro_and_each_step_in_micro():
    truth = 1100.0 + 100.0 * (np.arange(1000) % 5)
    jump = truth[:500] * np.repeat([1.0, 2.0], [400, 100])
    report = predict_then_learn([_capture("calm", truth), _capture("jumps", jump)])
    calm, jumps, macro, micro = (
        next(score for score in scores if score["model"] == TRACEFIT)
        for scores in (*(case["scores"] for case in report["cases"]), report["macro"], report["micro"])
    )
    assert calm["mape"] == pytest.approx(0.0, abs=1e-3)
    assert jumps["mape"] > 0.05
    predicted = [round(rows * (1.0 - each["missing"])) for rows, each in ((1000, calm), (500, jumps))]
    assert predicted == [1000 - 256, 500 - 256], "nothing is said while the first rows are held"
    assert macro["mape"] == pytest.approx((calm["mape"] + jumps["mape"]) / 2)
    assert micro["mape"] == pytest.approx(np.average([calm["mape"], jumps["mape"]], weights=predicted))


def test_a_file_of_forward_passes_is_scored_from_its_first_pass_on(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRACEFIT_CONFIG", raising=False)
    path = write_lines(tmp_path / "passes.jsonl.gz", fpm_lines(serve("llama8b-h100", 20.0, 11)))
    out = tmp_path / "report.json"
    assert main(["lab", "evaluate", str(path), "--protocol", "predict-then-learn", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"\n  {TRACEFIT} ") == 6, "and of beta alone"
    (case,) = json.loads(out.read_text())["cases"]
    found = {score["model"]: score for score in case["scores"]}
    assert found["tracefit"]["mape"] <= found["tracefit beta"]["mape"] < 0.1
    assert found["tracefit"]["missing"] < 0.5
    assert main(["lab", "evaluate", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "telemetry=fpm" in printed
    assert "portable × shape" in printed
    assert "blackbox" in printed
