"""What a process loads and starts with, seen from outside."""

import json
import os
import re
import subprocess
import sys

import collector
from tests.support.paths import DATA, ROOT

REPORT = """
import ctypes, glob, json, os, sys, threading
from collector.cli import main
code = main(sys.argv[1:])
told = {"modules": sorted(sys.modules)}
if "numpy" in sys.modules:
    (library,) = glob.glob(os.path.join(sys.modules["numpy"].__path__[0], "..", "numpy.libs", "*openblas*"))
    openblas = ctypes.CDLL(library)
    names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
    told["blas_threads"] = next(getattr(openblas, name)() for name in names if hasattr(openblas, name))
    told["threads_of_others"] = len(os.listdir("/proc/self/task")) - threading.active_count()
print(json.dumps(told), file=sys.stderr)
sys.exit(code)
"""


def told_by(*arguments):
    """Which modules a command has loaded at its end, and which threads run."""
    unset = {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GOTO_NUM_THREADS", "GRPC_VERBOSITY"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        [sys.executable, "-c", REPORT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    return json.loads(ended.stderr.splitlines()[-1])


def test_help_loads_no_library_and_a_replay_none_of_a_server_and_one_blas_thread(tmp_path):
    servers = {"grpc", "aiohttp", "prometheus_client"}
    loaded = set(told_by("--help")["modules"])
    assert "collector.cli" in loaded
    assert not ({"numpy", "google.protobuf", "http.server"} | servers) & loaded
    told = told_by("replay", DATA / "c1_mixed" / "otlp.pb.gz", "-o", tmp_path / "s.json")
    assert {"numpy", "river.linear_model"} <= set(told["modules"])
    assert not servers & set(told["modules"])
    assert told["blas_threads"] == 1, "however many cores there are"
    assert told["threads_of_others"] == 0, "threads that Python did not start"


def test_image_and_manifests_name_the_version():
    alone = ("Dockerfile", "CITATION.cff", "docs/deploy.md", "compose.yaml", "README.md")
    paths = [*(ROOT / name for name in alone), *(ROOT / "deploy").rglob("*.yaml")]
    marks = re.compile(r"(?:\btracefit[:-]|newTag: |ARG VERSION=|^version: )(\d+\.\d+\.\d+)", re.MULTILINE)
    named = [(str(path.relative_to(ROOT)), version) for path in paths for version in marks.findall(path.read_text())]
    assert {name for name, _ in named} >= set(alone)
    assert len(named) >= 9
    assert {version for _, version in named} == {collector.__version__}, named
