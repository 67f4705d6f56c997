"""In vLLM's process layouts: spawned and forked engine cores, data parallel ranks, processes without an engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.plugin.conftest import PLUGIN
from tests.plugin.receiver import attributes
from tests.support.clocks import eventually
from tests.support.sidecars import get, running_sidecar

HERE = Path(__file__).parent
PROJECT = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]


@pytest.fixture
def unpacked(tmp_path):
    """The plugin as an init container leaves it on a shared volume: a directory with package and metadata."""
    shutil.copytree(PLUGIN / "tracefit_vllm", tmp_path / "tracefit_vllm")
    metadata = tmp_path / f"tracefit_vllm-{PROJECT['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tracefit-vllm\nVersion: {PROJECT['version']}\n")
    lines = []
    for group, entries in PROJECT["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    package = tmp_path / "vllm" / "v1" / "core" / "sched"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.99.0"\n')
    (package / "scheduler.py").write_text("from fakes import Scheduler as Base\n\nclass Scheduler(Base):\n    pass\n")
    shutil.copy(HERE / "fakes.py", tmp_path)
    return tmp_path


def run(unpacked, receiver, mode, **env):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "TRACEFITVLLM_"))}
    environment |= {"PYTHONPATH": str(unpacked), "TRACEFITVLLM_ENDPOINT": f"http://{receiver.target}", **env}
    done = subprocess.run(
        [sys.executable, str(HERE / "engine_process.py"), mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def spans_once(receiver):
    """Spans with their instance; an export in flight when a process forks may be repeated, with its span ids."""
    found = {}
    for request in receiver.requests:
        for resource_spans in request.resource_spans:
            instance = attributes(resource_spans.resource)["service.instance.id"]
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    found.setdefault(span.span_id, (instance, scope_spans.scope.name, span))
    return list(found.values())


def steps_by_instance(receiver):
    found = defaultdict(list)
    for instance, _, span in spans_once(receiver):
        found[instance] += [attributes(e)["step.id"] for e in span.events if e.name == "step.BATCH_SUMMARY"]
    return {instance: steps for instance, steps in found.items() if steps}


@pytest.mark.parametrize("mode", ["spawn", "fork"])
def test_an_engine_core_is_watched_however_its_process_was_started(unpacked, receiver, mode):
    run(unpacked, receiver, mode)
    (steps,) = steps_by_instance(receiver).values()
    assert steps == list(range(1, 11))  # the last ones too: a finalizer sends them, atexit does not run there
    assert len(receiver.spans("vllm.scheduler")) == 5
    assert receiver.resources()[0]["vllm.version"] == "0.99.0"


def test_two_data_parallel_ranks_are_two_instances_with_steps_of_their_own(unpacked, receiver):
    run(unpacked, receiver, "dp", OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1,hw.gpu.name=H100")
    assert steps_by_instance(receiver) == {"pod-1/dp0": list(range(1, 11)), "pod-1/dp1": list(range(1, 11))}
    resources = {r["service.instance.id"]: r for r in receiver.resources()}
    assert [resources[f"pod-1/dp{rank}"]["vllm.data_parallel_rank"] for rank in (0, 1)] == [0, 1]
    assert {r["hw.gpu.name"] for r in resources.values()} == {"H100"}


def test_two_data_parallel_ranks_under_a_users_id_are_both_learned_from(unpacked, tmp_path):
    """The real plugin in spawned engine cores, real gRPC, a real sidecar and its page."""
    with running_sidecar(
        tmp_path / "sidecar", ALLOWED_LATENESS_S="1", JOIN_TIMEOUT_S="2", IDLE_TIMEOUT_S="2"
    ) as sidecar:
        target = SimpleNamespace(target=f"127.0.0.1:{sidecar.grpc_port}")
        run(unpacked, target, "serve", OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1,vllm.model=m")
        eventually(lambda: get(sidecar.http_port, "/").count(b"<li><code>pod-1/dp") == 2)
        page = get(sidecar.http_port, "/").decode()
    assert "<li><code>pod-1/dp0</code>" in page
    assert "<li><code>pod-1/dp1</code>" in page
    rows = {}
    for lineage in sidecar.pipeline._bank.lineages.values():
        for engine, spans in lineage.engines.items():
            rows[engine] = rows.get(engine, 0) + sum(count for *_, count in spans)
    assert rows.keys() == {"pod-1/dp0", "pod-1/dp1"}
    assert min(rows.values()) > 100


def test_a_process_without_an_engine_pays_nothing_and_sends_nothing(unpacked, receiver):
    run(unpacked, receiver, "api")
    assert not receiver.requests


def test_a_fork_in_mid_run_leaves_the_parent_as_it_was_and_a_child_that_sends_nothing(unpacked, receiver):
    run(unpacked, receiver, "midway")  # gRPC crashes a forked child that connects anew, or closes what it was left
    spans = [span for _, scope, span in spans_once(receiver) if scope == "vllm.scheduler"]
    assert Counter(attributes(span)["gen_ai.request.id"] for span in spans) == {"parent": 1, "parent-after": 1}
    assert list(steps_by_instance(receiver).values()) == [list(range(1, 22))]
    assert len({r["process.pid"] for r in receiver.resources()}) == 1


def test_the_distribution_has_one_entry_point_and_two_dependencies():
    assert PROJECT["entry-points"] == {"vllm.general_plugins": {"tracefit": "tracefit_vllm:register"}}
    names = {requirement.split(">")[0] for requirement in PROJECT["dependencies"]}
    assert names == {"grpcio", "opentelemetry-proto"}
