"""Run by a Python that has ai-dynamo: reads a directory with its own readers, and prints what they found.

Packages that these readers import and do not use (a simulator, cluster clients) are stood in for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

UNUSED = ("aisimulate", "aisimulate_core", "aiohttp", "kubernetes", "prometheus_client", "redis", "transformers", "zmq")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        del path, target
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in UNUSED else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__name__, module.__spec__, module.__path__, module.__file__ = spec.name, spec, [], ""
        return module

    def exec_module(self, module):
        pass


def main(directory: Path) -> None:
    sys.meta_path.append(StandIns())
    from dynamo.mocker.utils import planner_profiler_perf_data_converter as converter
    from dynamo.planner.core.perf_model import DecodeRegressionModel, PrefillRegressionModel
    from dynamo.planner.monitoring import perf_metrics

    prefill = perf_metrics._convert_prefill_profiling(str(directory))
    decode = perf_metrics._convert_decode_profiling(str(directory))
    converter.convert_profile_results_to_npz(directory, directory / "converted.npz")
    by_decode, by_prefill = DecodeRegressionModel(len(decode), 1), PrefillRegressionModel(len(prefill), 1)
    for model, points in ((by_decode, decode), (by_prefill, prefill)):
        model.load_benchmark_fpms(points)
        assert model._ensure_fitted()
    found = {
        "is_directory": converter.is_profile_results_dir(directory),
        "is_mocker": converter.is_mocker_format_npz(directory / "perf_data.npz"),
        "converted_is_mocker": converter.is_mocker_format_npz(directory / "converted.npz"),
        "decode": [
            [
                each.scheduled_requests.num_decode_requests,
                each.scheduled_requests.sum_decode_kv_tokens,
                each.wall_time,
                by_decode._predict_2d(
                    each.scheduled_requests.num_decode_requests, each.scheduled_requests.sum_decode_kv_tokens
                ),
            ]
            for each in decode
        ],
        "prefill": [
            [
                each.scheduled_requests.sum_prefill_tokens,
                each.wall_time,
                by_prefill._predict_wall_time(each.scheduled_requests.sum_prefill_tokens),
            ]
            for each in prefill
        ],
    }
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
