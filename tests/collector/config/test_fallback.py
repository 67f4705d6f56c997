"""A wrong configuration ends a terminal's start; a pod starts with the defaults, which are never more open."""

import json

import pytest

from collector.app import Sidecar
from collector.config import ConfigError, Fallback, load, load_or_degrade
from collector.runtime.tasks import SystemClock
from tests.support.sidecars import ask, get, metric

DEGRADE = {"TRACEFIT_ON_ERROR": "degrade"}
PORTS = {
    "TRACEFIT_LISTEN": "127.0.0.1:0",
    "TRACEFIT_LISTEN_HTTP": "127.0.0.1:0",
    "TRACEFIT_PAGES": "127.0.0.1:0",
    "TRACEFIT_LEARNERS": "[rls]",
}


@pytest.fixture
def environ(tmp_path):
    return DEGRADE | {"TRACEFIT_DIRECTORY": str(tmp_path)}


@pytest.fixture
def given(tmp_path):
    return tmp_path / "tracefit.yaml"


@pytest.mark.parametrize(
    "text", ["recievers: {}", "queue_mib: many", "queue: {capacity_bytes: 65536}", "{ not: [yaml", "\xff", None]
)
def test_a_wrong_file_ends_the_start_on_a_terminal_and_in_a_pod_leaves_the_defaults_and_the_environment(
    given, environ, text
):
    if text is not None:
        given.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError):
        load_or_degrade(given, {})
    with pytest.raises(ConfigError, match="TRACEFIT_ON_ERROR: expected exit or degrade"):
        load_or_degrade(given, environ | {"TRACEFIT_ON_ERROR": "degarde"})
    config, fallback = load_or_degrade(given, environ | {"TRACEFIT_ALLOWED_LATENESS_S": "99"})
    assert config == load(None, environ | {"TRACEFIT_ALLOWED_LATENESS_S": "99"})
    assert str(fallback).startswith("the defaults hold: ")
    assert not fallback.closed


def test_a_variable_that_cannot_be_used_is_left_out_and_the_others_hold(environ):
    config, fallback = load_or_degrade(
        None, environ | {"TRACEFIT_QUEUE__WAITS": "1", "TRACEFIT_JOIN_TIMEOUT_S": "77", "TRACEFIT_RULES": "5"}
    )
    assert config.join_timeout_s == 77
    assert "TRACEFIT_QUEUE__WAITS" in fallback.problem


@pytest.mark.parametrize(
    "text",
    [
        "pages_token_file: /nope\nx: 1",
        "forward_headers_file: /nope\nx: 1",
        "receivers: {tls: {cert_file: /x, key_file: /y}}\nx: 1",
        "{token_file",
    ],
)
def test_the_defaults_open_nothing_that_was_to_be_closed(given, environ, text):
    given.write_text(text)
    wanted = {"LISTEN": "0.0.0.0:4317", "FORWARD": "grpc://tempo:4317", "FPM": "tcp://a:1", "KV": "tcp://a:2"}
    config, fallback = load_or_degrade(given, environ | {f"TRACEFIT_{key}": value for key, value in wanted.items()})
    assert (config.listen, config.forward, config.fpm, config.kv) == ("127.0.0.1:4317", "", (), ())
    assert fallback.closed


@pytest.mark.parametrize(("closed", "status"), [(False, 200), (True, 401)])
def test_a_degraded_sidecar_serves_and_says_so_and_one_that_had_to_be_closed_shows_health_and_metrics_only(
    environ, closed, status
):
    sidecar = Sidecar(load(None, environ | PORTS), SystemClock(), fallback=Fallback("no token", closed))
    sidecar.start()
    try:
        told = json.loads(get(sidecar.http_port, "/readyz"))
        assert (told["ok"], told["config_problem"]) == (True, "the defaults hold: no token")
        assert metric(sidecar.http_port, "tracefit_config_degraded") == 1
        assert ask(sidecar.http_port, "/")[0] == status
        assert closed or b"no token" in get(sidecar.http_port, "/")
    finally:
        sidecar.stop()
