"""A snapshot made by hand: one configuration with factors and evidence, as a dictionary that tests may bend."""

import copy
import json

import numpy as np

import tracefit
from online.blocks import cell_name, strata_of
from online.rows import STEP_FEATURES, RowBlock, Target


def feature(name, coefficient, stderr, mean, status="identified"):
    unit = "us" if name == "intercept" else "us/token"
    return {
        "name": name,
        "unit": unit,
        "coefficient": coefficient,
        "stderr": stderr,
        "status": status,
        "mean": mean,
    }


def model(*features, rows=12_000):
    return {
        "features": list(features),
        "rows": rows,
        "effective_rows": float(rows),
        "error": {"mape": 0.03, "median_ape": 0.02, "p90_ape": 0.06},
    }


def target(vector, portable, **beside):
    return {"vector": vector, "unit": "us", "champion": "portable", "models": {"portable": portable}, **beside}


_TREE = {
    "schema": "tracefit.snapshot/1",
    "generation": 42,
    "created_unix_nano": 1_763_625_600_000_000_000,
    "tracefit_version": "0.1.0",
    "configs": [
        {
            "config_id": "0f3c5a9b77e1",
            "config": {
                "model": "meta-llama/Llama-3-8B",
                "gpu": "NVIDIA H100 80GB HBM3",
                "tensor_parallel_size": 1,
                "max_num_seqs": 128,
                "max_num_batched_tokens": 8192,
                "block_size": 16,
                "num_gpu_blocks": 26_000,
            },
            "engines": [{"instance": "vllm-0", "scheduling": "sync", "last_step": 900_000}],
            "telemetry": "steps",
            "targets": {
                "step_time": target(
                    "beta",
                    model(
                        feature("intercept", 7_900.0, 40.0, 1.0),
                        feature("prefill_tokens", 42.0, 0.3, 60.0),
                        feature("decode_context_tokens", 0.11, 0.002, 20_000.0),
                        feature("requests", 95.0, 4.0, 11.0),
                    ),
                    interval={
                        "p10": 0.94,
                        "p50": 1.0,
                        "p90": 1.08,
                        "strata": {
                            "decode:1": [0.97, 1.0, 1.05],
                            "decode:8-15": [0.97, 1.0, 1.04],
                            "prefill:8-15": [0.95, 1.0, 1.07],
                            "prefill:16-31": [0.95, 1.0, 1.07],
                        },
                    },
                    mean_us=13_400.0,
                    mean_factor=1.02,
                    shape_factors={
                        "decode:1": {"factor": 0.97, "rows": 800.0, "usual": [0.0, 1.0, 1_600.0, 7_920.0]},
                        "decode:8": {"factor": 1.01, "rows": 400.0, "usual": [0.0, 8.0, 14_400.0, 10_350.0]},
                        "prefill:16-31:512-724": {
                            "factor": 1.03,
                            "rows": 90.0,
                            "usual": [600.0, 21.0, 30_000.0, 39_600.0],
                        },
                    },
                    seen={
                        "features": {
                            "prefill_tokens": [0.0, 8192.0],
                            "decode_context_tokens": [0.0, 160_000.0],
                            "requests": [1.0, 60.0],
                        },
                        "cells": [
                            "decode:1",
                            "decode:8",
                            "decode:17-24",
                            "decode:33-40",
                            "decode:57-64",
                            *(
                                f"prefill:{requests}:{tokens}"
                                for requests in ("1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127")
                                for tokens in ("64-90", "256-362", "512-724", "1024-1448", "2048-2896")
                            ),
                        ],
                    },
                ),
                "api_queueing": target(
                    "alpha",
                    model(feature("intercept", 900.0, 30.0, 1.0), feature("prompt_tokens", 0.4, 0.1, 1_500.0)),
                    interval={"p10": 0.7, "p50": 1.0, "p90": 1.5},
                    mean_factor=1.1,
                ),
                "first_response": target("alpha", model(feature("intercept", 1_200.0, 20.0, 1.0))),
                "post_decode": target(
                    "alpha", model(feature("intercept", 1_500.0, 20.0, 1.0), feature("output_tokens", 1.7, 0.1, 300.0))
                ),
            },
        }
    ],
}


def tree():
    """A copy of its own."""
    return copy.deepcopy(_TREE)


def encoded(changed=None):
    """As bytes."""
    return json.dumps(_TREE if changed is None else changed).encode()


def config_of(changed=None):
    """Its configuration, as the client has it."""
    return tracefit.load(encoded(changed)).config()


def step_time_of(changed):
    """What its configuration publishes of the time of a step, to be bent."""
    return changed["configs"][0]["targets"]["step_time"]


def cell_of(prefill_tokens, requests):
    """The name by which the sidecar publishes the factor of such a step."""
    raw = np.zeros((1, len(STEP_FEATURES)))
    raw[0, STEP_FEATURES.index("prefill_tokens")] = prefill_tokens
    raw[0, STEP_FEATURES.index("requests")] = requests
    return cell_name(int(strata_of(Target.STEP_TIME, RowBlock.of_lines(raw, np.ones(1)))[1][0]))
