"""Where steps go comes from the plugin's own variables, and who the engine is from vLLM."""

import re
from types import SimpleNamespace

import pytest
from tracefit_vllm.settings import SettingError, Settings, read_settings, resource_attributes

from tests.plugin.conftest import PLUGIN
from tests.plugin.fakes import Scheduler, vllm_config

COMPANY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://otel-collector.observability:4318",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces.observability:4318",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    "OTEL_EXPORTER_OTLP_INSECURE": "false",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20secret",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "/etc/observability/ca.crt",
}
"""What an operator puts into every pod, for the traces of the company's collector."""


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("", "tcp://127.0.0.1:20380"),
        ("tcp://*:5", "tcp://*:5"),
        ("http://a:1", "http://a:1"),
        ("https://c", "https://c:4317"),
        ("http://[::1]:7", "http://[::1]:7"),
    ],
)
def test_the_scheme_of_the_endpoint_says_the_wire(text, endpoint):
    assert read_settings({"TRACEFITVLLM_ENDPOINT": text}) == Settings(endpoint)


def test_a_collector_that_the_environment_names_for_traces_gets_no_step_and_lends_no_credentials():
    assert read_settings(COMPANY) == Settings()
    own = {"TRACEFITVLLM_ENDPOINT": "https://gateway"}
    assert read_settings(COMPANY | own) == read_settings(own)
    own |= {"TRACEFITVLLM_HEADERS": "Authorization=Bearer%20x, a=b", "TRACEFITVLLM_CERTIFICATE": "/etc/tracefit/ca.crt"}
    settings = read_settings(COMPANY | own)
    assert settings.headers == (("authorization", "Bearer x"), ("a", "b"))
    assert settings.certificate == "/etc/tracefit/ca.crt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRACEFITVLLM_ENDPOINT", "ftp://a"),
        ("TRACEFITVLLM_ENDPOINT", "localhost:4317"),
        ("TRACEFITVLLM_ENDPOINT", "tcp://a"),
        ("TRACEFITVLLM_ENDPOINT", "http://a:99999"),
        ("TRACEFITVLLM_HEADERS", "novalue"),
        ("OTEL_RESOURCE_ATTRIBUTES", "=x"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name, value):
    with pytest.raises(SettingError, match=name):
        read_settings({name: value})


def test_every_variable_stands_in_the_readme_and_no_other():
    source = "".join(path.read_text() for path in (PLUGIN / "tracefit_vllm").glob("*.py"))
    known = set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", source))
    assert set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", (PLUGIN / "README.md").read_text())) == known


def test_the_resource_says_every_knob_that_is_known_and_nothing_made_up():
    found = resource_attributes(Scheduler(), Settings())
    assert {key: value for key, value in found.items() if key.startswith(("vllm.", "service.name"))} == {
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
    }
    bare = resource_attributes(SimpleNamespace(), Settings())
    assert {key for key in bare if key.startswith("vllm.")} == {"vllm.cpu_offload"}
    assert bare["service.instance.id"] != found["service.instance.id"]


def test_the_users_own_attributes_win():
    settings = read_settings({"OTEL_RESOURCE_ATTRIBUTES": "vllm.model=a%20b,team=c", "OTEL_SERVICE_NAME": "s-decode"})
    found = resource_attributes(Scheduler(), settings)
    assert (found["vllm.model"], found["team"], found["service.name"]) == ("a b", "c", "s-decode")


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ({"hf_config": {"num_local_experts": 8}}, 8),
        ({"hf_config": {}, "hf_text_config": {"n_routed_experts": 256}}, 256),
        ({"hf_config": {"num_experts": [64, 64]}}, None),
        ({}, None),
    ],
    ids=["local", "inside of text_config", "a list", "no file"],
)
def test_a_mixture_of_experts_says_how_many_there_are(file, found):
    config = vllm_config()
    for name, keys in file.items():
        setattr(config.model_config, name, SimpleNamespace(**keys))
    assert resource_attributes(SimpleNamespace(vllm_config=config), Settings()).get("vllm.num_experts") == found


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_one_users_instance_id_for_two_ranks_is_told_apart(moe):
    settings = Settings(resource={"service.instance.id": "pod"})
    told = [resource_attributes(Scheduler(config=vllm_config(rank=r, ranks=2, moe=moe)), settings) for r in (0, 1)]
    assert [found["service.instance.id"] for found in told] == ["pod/dp0", "pod/dp1"]
    assert [found["vllm.data_parallel_rank"] for found in told] == [0, 1]
    # each rank of a dense model is an engine of its own
    assert [found["vllm.data_parallel_size"] for found in told] == ([2, 2] if moe else [1, 1])
    assert resource_attributes(Scheduler(), settings)["service.instance.id"] == "pod"
