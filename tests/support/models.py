"""The models and the machine of the bundled recordings, as a user would configure them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from collector.config.load import load
from collector.config.schema import Config
from tests.support.paths import DATA


def configuration_of_captures() -> Config:
    """The captures' models and machine."""
    knobs = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 2048, "block_size": 32}
    machine = {"gpu": "cpu-capture", "dtype": "float32", "peak_tflops": 0.1, "memory_bandwidth_gb_s": 30}
    small, tiny = ({"model_config": str(DATA / "models" / f"{name}.config.json")} for name in ("modelB", "tinyA"))
    rules = [{"facts": knobs | machine | small}, {"match": {"recording": "*c9_dp2*"}, "facts": tiny}]
    return configured({"rules": rules})


def configured(tree: dict) -> Config:
    """A configuration as its file would say it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(tree, file)
        file.flush()
        return load(Path(file.name), {})
