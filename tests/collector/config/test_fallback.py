"""A wrong configuration ends a terminal's start; a pod starts with the defaults, which are never more open."""

import msgspec
import pytest

from collector.app import Sidecar
from collector.config import Config, ConfigError, load, load_or_degrade
from collector.runtime import Clock, running
from tests.support.sidecars import ask, metric, ready

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
def test_a_wrong_file_ends_the_start_on_a_terminal_and_in_a_pod_leaves_the_defaults_where_the_pod_may_write(
    given, environ, text, tmp_path
):
    if text is not None:
        given.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError):
        load_or_degrade(given, {})
    with pytest.raises(ConfigError, match="TRACEFIT_ON_ERROR: expected exit or degrade"):
        load_or_degrade(given, environ | {"TRACEFIT_ON_ERROR": "degarde"})
    wanted = {"LISTEN": "0.0.0.0:4317", "FORWARD": "grpc://tempo:4317", "PAGES": "0.0.0.0:1"}
    config, problem = load_or_degrade(given, environ | {f"TRACEFIT_{key}": value for key, value in wanted.items()})
    kept = Config(directory=str(tmp_path), pages="0.0.0.0:1")
    assert config == msgspec.structs.replace(kept, forward="grpc://tempo:4317"), "nothing is open that was to be closed"
    assert problem.startswith("the defaults hold: ")


def test_a_wrong_variable_is_named_and_what_it_tells_is_the_default(environ):
    config, problem = load_or_degrade(None, environ | {"TRACEFIT_PAGES": "nowhere"})
    assert config == Config()
    assert "TRACEFIT_PAGES" in problem
    config, problem = load_or_degrade(None, environ | {"TRACEFIT_FORWARD": "nowhere"})
    assert (config.forward, config.directory) == ("", environ["TRACEFIT_DIRECTORY"])
    assert "TRACEFIT_FORWARD" in problem


def test_a_degraded_sidecar_says_so_and_shows_health_and_metrics_only(environ):
    sidecar = Sidecar(load(None, environ | PORTS), Clock(), problem="no token")
    with running(sidecar):
        told = ready(sidecar)
        assert (told["ok"], told["config_problem"]) == (True, "no token")
        assert metric(sidecar.http_port, "tracefit_config_degraded") == 1
        status, _, body = ask(sidecar.http_port, "/")
        assert (status, body) == (401, b"closed while the configuration is wrong: see /readyz\n")
