"""``tracefit lab evaluate`` as people call it, on the bundled recordings."""

import json

from collector.cli import main
from tests.support.recordings import otlp_file
from tests.support.sheet_cases import DENSE


def test_a_bundled_recording_is_evaluated_with_its_model_file(tmp_path, capsys):
    model, config, out = (tmp_path / name for name in ("config.json", "tracefit.yaml", "report.json"))
    model.write_text(json.dumps(DENSE | {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8}))
    config.write_text(
        f"model_config: {model}\n"
        "rules:\n"
        "- facts: {gpu: box, max_num_seqs: 32, max_num_batched_tokens: 2048, max_model_len: 2048}\n"
        "- {match: {gpu: box}, facts: {peak_tflops: 0.1, memory_bandwidth_gb_s: 30, memory_gb: 24}}\n"
    )
    options = [f"--config={config}", f"--out={out}", "--systems=portable,physics,blackbox"]
    assert main(["lab", "evaluate", str(otlp_file("c6_saturated")), *options]) == 0
    printed = capsys.readouterr()
    assert "single requests: learned from 141, judged on the last 34" in printed.out
    assert "evaluated 1 source in " in printed.err
    (capture,) = json.loads(out.read_text())["captures"]
    found = {score["system"]: score for score in capture["scores"]}
    assert set(found) == {"portable", "physics", "blackbox"}
    assert found["portable"]["step_mape"] < 0.08
    assert found["portable"]["e2e"] < 0.01
    assert capture["scored_requests"] > 50
    assert {"request", "request at arrival"} <= {score["model"] for score in capture["served"]["scores"]}
