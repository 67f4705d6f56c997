"""In vLLM's process layouts: spawned and forked engine cores, data parallel ranks, processes without an engine."""

import os
import shutil
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from tests.plugin.conftest import PLUGIN
from tests.support.clocks import eventually
from tests.support.processes import free_port, output_of
from tests.support.sidecars import get, metric, running_sidecar

HERE = Path(__file__).parent
PROJECT = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
FAKE_VLLM = {
    "__init__.py": '__version__ = "0.99.0"\n',
    "config.py": """
from importlib import import_module

class SchedulerConfig:
    def __init__(self, scheduler_cls=None):
        self.scheduler_cls = scheduler_cls

    def get_scheduler_cls(self):
        module, _, name = (self.scheduler_cls or "vllm.v1.core.sched.scheduler.Scheduler").rpartition(".")
        return getattr(import_module(module), name)
""",
    "v1/core/sched/scheduler.py": """
from fakes import Scheduler as Fake

class Scheduler(Fake):
    def __init__(self, *, vllm_config):
        super().__init__(config=vllm_config, asynchronous=vllm_config.scheduler_config.async_scheduling)
""",
    "v1/core/sched/async_scheduler.py": """
from vllm.v1.core.sched.scheduler import Scheduler

class AsyncScheduler(Scheduler):
    pass
""",
}


@pytest.fixture
def unpacked(tmp_path):
    """The plugin as an init container leaves it on a shared volume, a directory with package and metadata; and vLLM."""
    shutil.copytree(PLUGIN / "tracefit_vllm", tmp_path / "tracefit_vllm")
    metadata = tmp_path / f"tracefit_vllm-{PROJECT['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tracefit-vllm\nVersion: {PROJECT['version']}\n")
    ((group, entries),) = PROJECT["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    for name, text in FAKE_VLLM.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(HERE / "fakes.py", tmp_path)
    return tmp_path


def run(unpacked, endpoint, mode, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "TRACEFITVLLM_"))}
    environment |= {"PYTHONPATH": str(unpacked), "TRACEFITVLLM_ENDPOINT": endpoint, **env}
    output_of(sys.executable, HERE / "engine_process.py", mode, env=environment)


@pytest.mark.parametrize("mode", ["spawn", "fork"])
def test_an_engine_core_is_watched_however_its_process_was_started(unpacked, receiver, mode):
    run(unpacked, receiver.url, mode, TRACEFITVLLM_HOOK="1" if mode == "fork" else "")
    assert sorted(receiver.steps()) == list(
        range(1, 19)
    )  # the last ones too: a finalizer sends them, atexit does not run there
    assert len({r["service.instance.id"] for r in receiver.resources()}) == 1
    assert receiver.resources()[0]["vllm.version"] == "0.99.0"


def test_both_ranks_of_a_server_are_learned_from_as_passes_on_the_ports_that_the_sidecar_was_told(unpacked, tmp_path):
    """The real plugin in spawned engine cores, real sockets, a real sidecar and its page."""
    port = free_port(following=1)
    go = tmp_path / "go"
    endpoints = f"tcp://127.0.0.1:{port},tcp://127.0.0.1:{port + 1}"
    settings = {"FPM": endpoints, "MODEL": "m", "IDLE_TIMEOUT_S": "1", "ALLOWED_LATENESS_S": "0.5"}
    with running_sidecar(tmp_path / "sidecar", **settings) as sidecar:
        told = {"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1", "GO": str(go)}
        engines = threading.Thread(target=run, args=(unpacked, f"tcp://127.0.0.1:{port}", "dp"), kwargs=told)
        engines.start()
        eventually(lambda: len(sidecar.pipeline.joiner.pass_engines) == 2)
        go.touch()
        engines.join()
        eventually(lambda: get(sidecar.http_port, "/").count(b"<li><code>pod-1") == 2)
        eventually(lambda: sidecar.snapshot().configs and sidecar.snapshot().configs[0].targets)
        page = get(sidecar.http_port, "/").decode()
        assert metric(sidecar.http_port, 'tracefit_messages_total{feed="fpm",outcome="accepted"}') > 1000
        (config,) = sidecar.snapshot().configs
    assert "<li><code>pod-1</code>" in page
    assert "<li><code>pod-1/dp1</code>" in page
    assert (config.telemetry, config.config["model"]) == ("fpm", "m")
    assert config.targets.keys() == {"step_time"}


def test_a_process_without_an_engine_pays_nothing_and_sends_nothing(unpacked, receiver):
    run(unpacked, receiver.url, "api")
    assert not receiver.requests


def test_the_distribution_has_one_entry_point_and_needs_only_what_vllm_has():
    assert PROJECT["entry-points"] == {"vllm.general_plugins": {"tracefit": "tracefit_vllm:register"}}
    assert {requirement.split(">")[0] for requirement in PROJECT["dependencies"]} == {"msgspec", "pyzmq"}
    assert PROJECT["optional-dependencies"].keys() == {"otlp"}
