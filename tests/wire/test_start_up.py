"""What a process loads and starts with, seen from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import collector
from tests.support.paths import DATA, ROOT
from tests.support.processes import tracefit

BLAS = """
import atexit, ctypes, glob, os, sys, threading
from collector.cli import main

def report():
    import numpy
    (library,) = glob.glob(os.path.join(os.path.dirname(numpy.__file__), "..", "numpy.libs", "*openblas*"))
    openblas = ctypes.CDLL(library)
    names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
    threads = next(getattr(openblas, name)() for name in names if hasattr(openblas, name))
    print(threads, len(os.listdir("/proc/self/task")) - threading.active_count(), file=sys.stderr)

code = main(sys.argv[1:])
report()
sys.exit(code)
"""
LOADED = """
import json, sys
from collector.cli import main
main(sys.argv[1:])
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def run(script, *arguments):
    unset = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS", "GRPC_VERBOSITY"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    return ended.stderr.splitlines()[-1]


@pytest.mark.skipif(os.cpu_count() == 1, reason="OpenBLAS has one thread on one core, whatever it is told")
def test_one_blas_thread_however_many_cores(tmp_path):
    recording = DATA / "c1_mixed" / "otlp.pb.gz"
    threads, not_ours = run(BLAS, "replay", recording, "--snapshot", tmp_path / "s.json").split()
    assert threads == "1"
    assert not_ours == "0", "a thread that Python did not start"


def test_help_loads_no_library_and_a_replay_none_of_a_server(tmp_path):
    servers = {"grpc", "aiohttp", "prometheus_client"}
    loaded = set(json.loads(run(LOADED, "--help")))
    assert "collector.cli" in loaded
    assert not ({"numpy", "google.protobuf", "http.server"} | servers) & loaded
    loaded = set(json.loads(run(LOADED, "replay", DATA / "c1_mixed" / "otlp.pb.gz", "-o", tmp_path / "s.json")))
    assert {"numpy", "river.linear_model"} <= loaded
    assert not servers & loaded


def test_the_version_stands_once():
    assert tracefit("--version").stdout == f"tracefit {collector.__version__}\n"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project


def test_image_and_manifests_name_the_version():
    alone = ("Dockerfile", "CITATION.cff", "docs/deploy.md")
    paths = [*(ROOT / name for name in alone), *(ROOT / "deploy").rglob("*.yaml")]
    marks = re.compile(r"(?:\btracefit:|newTag: |ARG VERSION=|^version: )(\d+\.\d+\.\d+)", re.MULTILINE)
    named = [(str(path.relative_to(ROOT)), version) for path in paths for version in marks.findall(path.read_text())]
    assert {name for name, _ in named} >= set(alone)
    assert len(named) >= 9
    assert {version for _, version in named} == {collector.__version__}, named
