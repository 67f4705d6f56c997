"""The models and the machine of the bundled recordings, as a user would configure them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from collector.config.load import load
from collector.config.schema import Config
from collector.identity.knowledge import Knowledge
from tests.support.paths import DATA


def knowledge_of_captures() -> Knowledge:
    """The captures' models and machine, as a user would configure them."""
    models = DATA / "models"
    knobs = {
        "gpu": "cpu-capture",
        "dtype": "float32",
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "block_size": 32,
    }
    tree = {
        "rules": [
            {"facts": {**knobs, "model_config": str(models / "modelB.config.json")}},
            {"match": {"gpu": "cpu-capture"}, "facts": {"peak_tflops": 0.1, "memory_bandwidth_gb_s": 30}},
            {"match": {"recording": "*c9_dp2*"}, "facts": {"model_config": str(models / "tinyA.config.json")}},
        ],
    }
    return Knowledge(configured(tree))


def configured(tree: dict) -> Config:
    """A configuration as its file would say it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(tree, file)
        file.flush()
        return load(Path(file.name), {})
