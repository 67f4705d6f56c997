"""Settings come from the environment; what cannot be read is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tracefit_vllm.settings import SettingError, Settings, read_settings

from tests.plugin.conftest import PLUGIN
from tests.support.paths import ROOT


def test_without_any_variable_it_sends_to_the_sidecar_beside_it():
    assert read_settings({}) == Settings()
    assert Settings().target == "127.0.0.1:4317"


@pytest.mark.parametrize(
    ("env", "target", "secure"),
    [
        ({"TRACEFITVLLM_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"}, "a:1", False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"}, "b:2", False),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:2"},
            "c:4317",
            True,
        ),
        ({"TRACEFITVLLM_ENDPOINT": "localhost:5"}, "localhost:5", False),
        ({"TRACEFITVLLM_ENDPOINT": "a:5", "OTEL_EXPORTER_OTLP_INSECURE": "false"}, "a:5", True),
        ({"TRACEFITVLLM_ENDPOINT": "http://[::1]:7"}, "[::1]:7", False),
        ({"TRACEFITVLLM_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "a:1", False),
    ],
)
def test_the_endpoint_is_the_nearest_variable_and_its_scheme_decides_on_tls(env, target, secure):
    settings = read_settings(env)
    assert (settings.target, settings.secure) == (target, secure)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TRACEFITVLLM_STEP_SAMPLE", "nan"),
        ("TRACEFITVLLM_STEP_SAMPLE", "1.5"),
        ("TRACEFITVLLM_SNAPSHOT_SAMPLE", "some"),
        ("TRACEFITVLLM_QUEUE_ITEMS", "0"),
        ("TRACEFITVLLM_TIMEOUT_S", "0"),
        ("TRACEFITVLLM_JOURNEYS", "maybe"),
        ("TRACEFITVLLM_KV_EVENTS", "2"),
        ("TRACEFITVLLM_ENABLED", "perhaps"),
        ("TRACEFITVLLM_ENDPOINT", "ftp://a"),
        ("TRACEFITVLLM_ENDPOINT", "http://a:99999"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "novalue"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name, value):
    with pytest.raises(SettingError, match=name):
        read_settings({name: value})


def test_an_endpoint_for_otlp_over_http_is_not_taken_for_a_grpc_one():
    with pytest.raises(SettingError, match="OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"):
        read_settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://b:4318"})
    assert read_settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}).target == "127.0.0.1:4317"


def test_headers_and_resource_attributes_are_read_as_otel_writes_them():
    settings = read_settings(
        {
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20x, a=b",
            "OTEL_RESOURCE_ATTRIBUTES": "hw.gpu.name=NVIDIA%20H100,service.name=s",
        }
    )
    assert settings.headers == (("authorization", "Bearer x"), ("a", "b"))
    assert settings.resource == {"hw.gpu.name": "NVIDIA H100"}
    assert settings.service_name == "s"


@pytest.mark.parametrize("document", [PLUGIN / "README.md", ROOT / "docs" / "plugin.md"])
def test_every_variable_stands_in_the_documents_and_no_other(document):
    source = "".join(path.read_text() for path in Path(PLUGIN / "tracefit_vllm").glob("*.py"))
    known = set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", source))
    assert set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", document.read_text())) == known
