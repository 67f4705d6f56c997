"""Settings come from the environment; what cannot be read is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tracefit_vllm.settings import SettingError, Settings, read_settings

from tests.plugin.conftest import PLUGIN


def test_without_any_variable_it_sends_to_the_sidecar_beside_it():
    assert read_settings({}) == Settings()
    assert Settings().target == "127.0.0.1:4317"


@pytest.mark.parametrize(
    ("text", "target", "secure"),
    [
        ("http://a:1", "a:1", False),
        ("https://c", "c:4317", True),
        ("localhost:5", "localhost:5", False),
        ("http://[::1]:7", "[::1]:7", False),
    ],
)
def test_the_scheme_of_the_endpoint_decides_on_tls(text, target, secure):
    settings = read_settings({"TRACEFITVLLM_ENDPOINT": text})
    assert (settings.target, settings.secure) == (target, secure)


COMPANY = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://otel-collector.observability:4318",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces.observability:4318",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_INSECURE": "false",
    "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20secret",
    "OTEL_EXPORTER_OTLP_CERTIFICATE": "/etc/observability/ca.crt",
}
"""What an operator puts into every pod, for the traces of the company's collector."""


def test_steps_do_not_go_to_the_collector_that_the_environment_names_for_traces():
    assert read_settings(COMPANY) == Settings()


def test_a_named_endpoint_gets_no_credentials_that_were_meant_for_another_receiver():
    own = {"TRACEFITVLLM_ENDPOINT": "https://gateway"}
    assert read_settings(COMPANY | own) == read_settings(own)
    own |= {"TRACEFITVLLM_HEADERS": "authorization=Bearer%20x", "TRACEFITVLLM_CERTIFICATE": "/etc/tracefit/ca.crt"}
    settings = read_settings(COMPANY | own)
    assert (settings.target, settings.secure) == ("gateway:4317", True)
    assert (settings.headers, settings.certificate) == ((("authorization", "Bearer x"),), "/etc/tracefit/ca.crt")


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
        ("TRACEFITVLLM_HEADERS", "novalue"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(name, value):
    with pytest.raises(SettingError, match=name):
        read_settings({name: value})


def test_headers_and_resource_attributes_are_read_as_otel_writes_them():
    settings = read_settings(
        {
            "TRACEFITVLLM_HEADERS": "Authorization=Bearer%20x, a=b",
            "OTEL_RESOURCE_ATTRIBUTES": "hw.gpu.name=NVIDIA%20H100,service.name=s",
        }
    )
    assert settings.headers == (("authorization", "Bearer x"), ("a", "b"))
    assert settings.resource == {"hw.gpu.name": "NVIDIA H100"}
    assert settings.service_name == "s"


def test_every_variable_stands_in_the_readme_and_no_other():
    source = "".join(path.read_text() for path in Path(PLUGIN / "tracefit_vllm").glob("*.py"))
    known = set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", source))
    assert set(re.findall(r"TRACEFITVLLM_[A-Z_]+[A-Z]", (PLUGIN / "README.md").read_text())) == known
