"""The image: built without a daemon, small, and running as it will run in a pod.

Takes minutes and an apt mirror for the base, so it runs only where IMAGE_TEST=1 asks for it (.ci/run does).
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import find_tool
from tests.support.paths import ROOT

BASE = "localhost/tracefit-base:bookworm"
IMAGE, FLEET_IMAGE = "localhost/tracefit:test", "localhost/tracefit:test-fleet"
CONTEXT = "collector online exporters tracefit deploy/vllm-plugin tests/data/c10_long tests/data/simulated"
FILES = "pyproject.toml requirements.lock requirements-fleet.lock README.md LICENSE Dockerfile .dockerignore"

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("IMAGE_TEST") != "1", reason="building the image takes minutes: IMAGE_TEST=1"),
]


def run(*command, **kwargs):
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, **kwargs)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """What the image is made of, with all wheels fetched beforehand, beside a minimal Debian as its base."""
    buildah, work = find_tool("buildah"), tmp_path_factory.mktemp("image")
    if subprocess.run([buildah, "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode:
        packages = "--include=python3,python3-venv,ca-certificates"
        run(find_tool("mmdebstrap"), "--quiet", "--variant=minbase", packages, "bookworm", str(work / "base.tar"))
        container = run(buildah, "from", "scratch").strip()
        run(buildah, "add", "-q", container, str(work / "base.tar"), "/")
        run(buildah, "commit", "-q", container, BASE)
        run(buildah, "rm", container)
    context = work / "context"
    for name in CONTEXT.split():
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES.split():
        shutil.copy2(ROOT / name, context / name)
    return context


def built(context, tag, locks, *arguments):
    """The image's id, of the wheels in these locks."""
    listed = [part for lock in locks for part in ("-r", str(ROOT / lock))]
    wheels = ["--require-hashes", *listed, "-d", str(context / "wheelhouse")]
    run(sys.executable, "-m", "pip", "download", "--quiet", "--python-version", "3.11", "--only-binary=:all:", *wheels)
    given = (f"BASE={BASE}", "PIP_ARGS=--no-index --find-links wheelhouse", "REVISION=test", *arguments)
    options = [part for argument in given for part in ("--build-arg", argument)]
    return run(find_tool("buildah"), "bud", "-q", "--format", "docker", *options, "-t", tag, str(context)).strip()


@pytest.fixture(scope="module")
def image(context):
    """The image that everybody runs."""
    return built(context, IMAGE, ["requirements.lock"])


@pytest.fixture(scope="module")
def container(image):
    """A working container of the image."""
    buildah = find_tool("buildah")
    name = run(buildah, "from", "--pull-never", image).strip()
    yield lambda *command, user="65532:65532": run(buildah, "run", "--user", user, name, "--", *command)
    run(buildah, "rm", name)


def test_the_image_says_what_it_is_and_runs_as_nobody(image):
    described = json.loads(run(find_tool("buildah"), "inspect", "--type", "image", image))["Docker"]["config"]
    assert described["User"] == "65532:65532"
    assert described["Entrypoint"] == ["tracefit"]
    assert described["Cmd"] == ["run"]
    assert set(described["ExposedPorts"]) == {"4317/tcp", "4318/tcp", "9464/tcp"}
    assert described["Labels"]["org.opencontainers.image.title"] == "tracefit"
    assert described["Labels"]["org.opencontainers.image.revision"] == "test"
    assert "healthz" in " ".join(described["Healthcheck"]["Test"])


def test_the_program_starts_as_nobody_and_nothing_for_developers_is_inside(container):
    assert container("id", "-u").strip() == "65532"
    assert "tracefit" in container("tracefit", "--version")
    listed = container("ls", "/opt/tracefit/lib/python3.11/site-packages").split()
    assert {"grpc", "river", "msgspec", "zmq"} <= set(listed)
    assert not {"pip", "pytest", "ruff", "mypy", "hatchling"} & set(listed)


SERVE = """
import json, os, signal, subprocess, time, urllib.request
environment = {**os.environ, "TRACEFIT_LISTEN": "127.0.0.1:14317",
               "TRACEFIT_PAGES": "127.0.0.1:19464", "TRACEFIT_DIRECTORY": "snapshots"}
process = subprocess.Popen(["tracefit", "run"], env=environment)
for _ in range(300):
    try:
        ready = json.load(urllib.request.urlopen("http://127.0.0.1:19464/readyz", timeout=1))
        break
    except OSError:
        time.sleep(0.1)
page = urllib.request.urlopen("http://127.0.0.1:19464/metrics", timeout=5).read()
process.send_signal(signal.SIGTERM)
print(json.dumps({"ready": ready["ok"], "page": b"tracefit_build_info" in page, "exit": process.wait(20)}))
"""


def test_the_sidecar_serves_from_the_image_and_stops_when_told(container):
    answer = json.loads(container("python3", "-c", SERVE).splitlines()[-1])
    assert answer == {"ready": True, "page": True, "exit": 0}


def test_the_plugin_for_an_unforked_vllm_is_inside_where_python_would_find_it(container):
    find = (
        "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='vllm.general_plugins')))"
    )
    found = container("env", "PYTHONPATH=/opt/tracefit-vllm", "python3", "-c", find)
    assert found.split() == ["tracefit_vllm:register"]


def test_the_image_for_fleets_replays_in_bulk_and_has_ray_and_object_stores(context):
    locks = ["requirements.lock", "requirements-fleet.lock"]
    image = built(context, FLEET_IMAGE, locks, "EXTRAS=kv,fleet")
    buildah = find_tool("buildah")
    name = run(buildah, "from", "--pull-never", image).strip()
    try:
        inside = [buildah, "run", "--user", "65532:65532", name, "--"]
        run(*inside, "python3", "-c", "import ray, fsspec, s3fs")
        recording = run(*inside, "find", "/opt/tracefit", "-path", "*c10_long*", "-name", "*.pb.gz").split()[0]
        replayed = run(*inside, "tracefit", "fleet", "replay", recording, "-o", "/tmp/fleet")
        assert "15,827 step rows" in replayed
    finally:
        run(buildah, "rm", name)
