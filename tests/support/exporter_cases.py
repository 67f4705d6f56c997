"""Snapshots for the exporters' tests: one of ordinary looks, one of the size of a full page."""

from __future__ import annotations

import os
import re

import msgspec

from collector.config.schema import Config
from online.bank import Bank
from online.errors import RATIO_BOUNDS
from online.rows import Target
from online.snapshot import (
    ConfigSnapshot,
    CorrectionSnapshot,
    DriftSnapshot,
    EngineSnapshot,
    ErrorSnapshot,
    FeatureSnapshot,
    IntervalSnapshot,
    LevelSnapshot,
    ModelSnapshot,
    ReplicaSnapshot,
    ResidualSnapshot,
    SeenSnapshot,
    ShapeFactorSnapshot,
    Snapshot,
    TargetSnapshot,
)
from tests.support.linear_steps import steps
from tests.support.paths import DATA

NS_PER_S = 1_000_000_000
CREATED_UNIX_NANO = 1_763_625_600_123_456_789

PORTABLE = {
    Target.STEP_TIME: {
        "intercept": 16800.0,
        "prefill_tokens": 580.0,
        "decode_context_tokens": 0.07,
        "requests": 1300.0,
    },
    Target.SCHEDULE_TIME: {"intercept": 51.5, "requests": 1.25, "prefill_requests": 9.0},
    Target.API_QUEUEING: {"intercept": 9315.34, "prompt_tokens": 1.5},
    Target.QUEUE_WAIT: {"intercept": 900.0, "waiting": 21000.0, "prompt_tokens": 0.5},
    Target.POST_DECODE: {"intercept": 1849.59, "output_tokens": 1.7079},
    Target.FIRST_RESPONSE: {"intercept": 7400.0},
    Target.PREEMPTION_GAP: {"intercept": 250_000.0},
}
MEAN_TOKENS = {"prompt_tokens": 400.0, "output_tokens": 247.0}
MEANS_US = {
    Target.STEP_TIME: 20_000.0,
    Target.SCHEDULE_TIME: 68.0,
    Target.API_QUEUEING: 14_100.0,
    Target.QUEUE_WAIT: 52_000.0,
    Target.POST_DECODE: 2_271.4413,  # 247 output tokens
    Target.FIRST_RESPONSE: 7_400.0,
    Target.PREEMPTION_GAP: 250_000.0,
}
PHYSICS = {
    Target.STEP_TIME: {
        "intercept": 9000.0,
        "has_prefill": 350.0,
        "t_tok": 1.9,
        "hinge": 0.4,
        "t_kv": 1.1,
        "t_pfattn": 2.2,
        "requests": 31.0,
        "t_experts": 0.3,
    },
    Target.API_QUEUEING: {"intercept": 9300.0, "prompt_tokens": 1.4, "running": 8.0},
    Target.QUEUE_WAIT: {"intercept": 910.0, "waiting": 20000.0, "t_prompt": 1.6, "saturated": 25000.0},
}


def _unit(column):
    """Of its coefficient."""
    if column in {"intercept", "has_prefill"}:
        return "us"
    if column.startswith("t_") or column == "hinge":
        return "us/us"
    return "us/token" if column.endswith("_tokens") else "us/request"


REPLICAS = [
    ReplicaSnapshot(engine="vllm-7", rows=400, differs=True, ratio=1.6, stderr=0.0078125),
    ReplicaSnapshot(engine="vllm-0", rows=800, differs=False, ratio=0.96875, stderr=0.03125),
    ReplicaSnapshot(engine="", rows=3, differs=False),
]


def model(coefficients, *, status="identified"):
    """A model with these coefficients by column."""
    return ModelSnapshot(
        features=[
            FeatureSnapshot(
                name=name,
                unit=_unit(name),
                coefficient=value,
                status=status,
                stderr=value / 64,
                mean=MEAN_TOKENS.get(name),
            )
            for name, value in coefficients.items()
        ],
        rows=1154,
        effective_rows=1010.25,
        condition_number=61.0 if coefficients else None,
        error=ErrorSnapshot(mape=0.021, median_ape=0.013, p90_ape=0.045),
    )


def target(name, *, physics=False, drifted=False, merged=False):
    """A target with its portable model, and the physics model on request."""
    name = Target(name)
    models = {"portable": model(PORTABLE[name]), "river:linear_model.PARegressor/portable": model({})}
    shapes: dict = {}
    if name is Target.STEP_TIME:
        better = ErrorSnapshot(mape=0.014, median_ape=0.009, p90_ape=0.03)
        shaped = ErrorSnapshot(mape=0.016, median_ape=0.011, p90_ape=0.034)
        models["portable"] = msgspec.structs.replace(models["portable"], prediction_error=better, shaped_error=shaped)
        sizes = ("1", "2-3", "4-7", "8-15", "16-31", "32-63")
        factors = {"decode:3": (1.125, 812.0), "decode:17-24": (0.97, 140.0), "prefill:8-15:64-90": (1.03, 12.0)}
        shapes = {
            "shape_factors": {cell: ShapeFactorSnapshot(factor=f, rows=rows) for cell, (f, rows) in factors.items()},
            "level": {
                "decode": LevelSnapshot(
                    factor=1.0625, half_life_rows=20, rows=900, last_row_unix_nano=CREATED_UNIX_NANO - NS_PER_S
                ),
                "prefill": LevelSnapshot(factor=1.0, rows=140, last_row_unix_nano=CREATED_UNIX_NANO - 2 * NS_PER_S),
            },
            "correction": CorrectionSnapshot(
                learner="river:residual",
                active=True,
                factor=1.03125,
                rows={"learned": 700, "thinned": 440},
            ),
            "replicas": REPLICAS if merged else [],
            "seen": SeenSnapshot(
                features={"prefill_tokens": (0.0, 512.0), "requests": (1.0, 64.0)},
                cells=sorted([*factors, "decode:57-64", *(f"prefill:{size}:256-362" for size in sizes)]),
            ),
        }
    if physics:
        models |= {"physics": model(PHYSICS[name]), "river:linear_model.PARegressor/physics": model({})}
    return TargetSnapshot(
        vector=name.vector,
        unit="us",
        champion="physics" if physics else "portable",
        models=models,
        interval=IntervalSnapshot(p10=0.97, p50=1.0, p90=1.04, strata={"decode:8-15": (0.98, 1.0, 1.03)}),
        residuals=ResidualSnapshot(
            ratio_bounds=list(RATIO_BOUNDS), rows=[1, 3, 20, 110, 420, 390, 140, 15, 5, 2], ratio_sum=1111.25
        ),
        drift=DriftSnapshot(
            last_unix_nano=CREATED_UNIX_NANO - 60_000_000_000 if drifted else None,
            gain=1.2 if drifted else None,
            count=int(drifted),
        ),
        mean_us=MEANS_US[name],
        **shapes,
    )


def config(config_id="0f3c52aa9b1e", *, name="meta-llama/Llama-2-7b-hf", targets=None, telemetry="steps"):
    """A configuration with one engine."""
    if targets is None:
        targets = {
            "step_time": target("step_time", physics=True, drifted=True, merged=True),
            "api_queueing": target("api_queueing"),
            "post_decode": target("post_decode"),
            "first_response": target("first_response"),
        }
    return ConfigSnapshot(
        config_id=config_id,
        config={
            "model": name,
            "gpu": "H100",
            "tensor_parallel_size": 2,
            "max_num_seqs": 256,
            "enable_prefix_caching": True,
            "num_gpu_blocks": 7462,
        },
        engines=[EngineSnapshot(instance="vllm-0", scheduling="sync", last_step=2416)],
        telemetry=telemetry,
        targets=targets,
        last_heard_unix_nano=CREATED_UNIX_NANO - 4_000_000_000,
    )


def config_for_blis(config_id="0f3c52aa9b1e"):
    """A configuration whose facts have all that a file for BLIS needs."""
    known = config(config_id)
    sheet = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    return msgspec.structs.replace(known, config={**known.config, **sheet})


def snapshot(*configs, generation=42):
    """A snapshot of the given configurations; one ordinary one if none are given."""
    return Snapshot(
        generation=generation,
        created_unix_nano=CREATED_UNIX_NANO,
        tracefit_version="0.1.0",
        configs=list(configs) or [config()],
    )


def full_snapshot(n_configs):
    """Every target learned by default and drifted once, none suspected now, one batch shape, in every configuration."""
    targets = {name.value: _by_default(target(name, physics=name in PHYSICS, drifted=True)) for name in PORTABLE}
    one_shape = dict(sorted(targets["step_time"].shape_factors.items())[:1])
    targets["step_time"] = msgspec.structs.replace(targets["step_time"], shape_factors=one_shape)
    return snapshot(*(config(f"{i:012x}", targets=targets) for i in range(n_configs)), generation=1)


def _by_default(target):
    """Without models that the default learners do not make."""
    models = {name: each for name, each in target.models.items() if each.features}
    return msgspec.structs.replace(target, models=models)


def learned_history():
    """The history of a configuration that has learned 4,000 steps."""
    bank = Bank(Config(learners=("rls",)))
    bank.learn("c", Target.STEP_TIME, steps(4000, 1).rows)
    return bank.history("c")


def assert_golden(name, actual):
    """Compare text with tests/data/<name>, numbers to nine digits; ``UPDATE_GOLDEN=1`` rewrites the file, for review.

    Beyond those digits versions of Python differ, which add floats in other ways.
    """
    path = DATA / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_bytes(actual)
    golden, page = (
        re.sub(r"\d+\.\d{9,}", lambda digits: f"{float(digits[0]):.9g}", text.decode())
        for text in (path.read_bytes(), actual)
    )
    assert golden == page, "UPDATE_GOLDEN=1 pytest rewrites the golden files"
