"""The resource says who the engine is, in tracefit's names."""

from __future__ import annotations

import sys
import types

import pytest
from tracefit_vllm.facts import resource_attributes
from tracefit_vllm.settings import Settings

from tests.plugin.fakes import Scheduler, vllm_config


def test_every_knob_of_the_configuration_that_is_known_is_there():
    found = resource_attributes(Scheduler(), Settings())
    assert (
        found.items()
        >= {
            "vllm.model": "tiny",
            "vllm.dtype": "float32",
            "vllm.quantization": "none",
            "vllm.tensor_parallel_size": 2,
            "vllm.pipeline_parallel_size": 1,
            "vllm.expert_parallel": False,
            "vllm.data_parallel_size": 1,
            "vllm.data_parallel_rank": 0,
            "vllm.max_num_seqs": 32,
            "vllm.max_num_batched_tokens": 64,
            "vllm.max_model_len": 2048,
            "vllm.block_size": 16,
            "vllm.num_gpu_blocks": 64,
            "vllm.enable_prefix_caching": True,
            "vllm.enable_chunked_prefill": True,
            "vllm.async_scheduling": False,
            "vllm.cpu_offload": False,
            "service.name": "vllm",
        }.items()
    )


def test_what_cannot_be_read_is_absent_not_made_up():
    found = resource_attributes(types.SimpleNamespace(), Settings())
    assert not [
        key for key in found if key.startswith("vllm.") and key not in ("vllm.async_scheduling", "vllm.cpu_offload")
    ]
    assert (
        found["service.instance.id"] != resource_attributes(types.SimpleNamespace(), Settings())["service.instance.id"]
    )


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ({"hf_config": {"num_local_experts": 8}}, 8),
        ({"hf_config": {}, "hf_text_config": {"n_routed_experts": 256}}, 256),
        ({"hf_config": {"num_experts": [64, 64]}}, None),
        ({"hf_config": {}}, None),
        ({}, None),
    ],
    ids=["local", "inside of text_config", "a list", "dense", "no file"],
)
def test_a_mixture_of_experts_says_how_many_there_are(file, found):
    config = vllm_config()
    for name, keys in file.items():
        setattr(config.model_config, name, types.SimpleNamespace(**keys))
    resource = resource_attributes(types.SimpleNamespace(vllm_config=config), Settings())
    assert resource.get("vllm.num_experts") == found


def test_the_users_own_attributes_win():
    found = resource_attributes(Scheduler(), Settings(resource={"vllm.model": "llama", "team": "a"}))
    assert (found["vllm.model"], found["team"]) == ("llama", "a")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_one_users_instance_id_for_two_ranks_is_told_apart(moe):
    settings = Settings(resource={"service.instance.id": "pod"})
    resources = [
        resource_attributes(Scheduler(config=vllm_config(rank=rank, ranks=2, moe=moe)), settings) for rank in (0, 1)
    ]
    assert [found["service.instance.id"] for found in resources] == ["pod/dp0", "pod/dp1"]
    assert [found["vllm.data_parallel_rank"] for found in resources] == [0, 1]
    assert resource_attributes(Scheduler(), settings)["service.instance.id"] == "pod"


def test_the_data_parallel_size_counts_the_ranks_that_step_together():
    sizes = [
        resource_attributes(Scheduler(config=vllm_config(rank=1, ranks=2, moe=moe)), Settings())[
            "vllm.data_parallel_size"
        ]
        for moe in (False, True)
    ]
    assert sizes == [1, 2]  # each rank of a dense model is an engine of its own


def test_a_kv_offloading_connector_counts_as_cpu_offload():
    scheduler = Scheduler()
    scheduler.vllm_config.kv_transfer_config = types.SimpleNamespace(kv_connector="OffloadingConnector")
    assert resource_attributes(scheduler, Settings())["vllm.cpu_offload"] is True


class Cuda:
    """A platform whose name could only be had by creating a CUDA context."""

    def is_cuda(self):
        return True

    def get_device_name(self):
        return "NVIDIA H100"


class NvmlCuda(Cuda):
    pass


@pytest.mark.parametrize(
    ("platform", "initialized", "name"),
    [(NvmlCuda, False, "NVIDIA H100"), (Cuda, False, None), (Cuda, True, "NVIDIA H100")],
)
def test_asking_for_the_devices_name_never_creates_a_cuda_context(monkeypatch, platform, initialized, name):
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform()))
    cuda = types.SimpleNamespace(is_initialized=lambda: initialized)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert resource_attributes(Scheduler(), Settings()).get("hw.gpu.name") == name
