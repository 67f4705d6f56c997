"""Recordings, states and rows in stores other than S3, each a server on loopback; ``make test-stores``."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.support.fleets import record_two_minutes, state_of
from tests.support.paths import ROOT
from tests.support.store_servers import AZURITE

BEGIN_NS = 1_700_000_000_000_000_000
PACKAGES = {"gs": ("gcsfs", "gcp_storage_emulator"), "az": ("adlfs",)}


def absent(scheme):
    missing = [name for name in PACKAGES[scheme] if importlib.util.find_spec(name) is None]
    return missing + (["azurite"] if scheme == "az" and not AZURITE.exists() else [])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            scheme,
            marks=pytest.mark.skipif(
                bool(absent(scheme)),
                reason=f"{', '.join(absent(scheme))} not installed: {scheme}:// is NOT tested here (make test-stores)",
            ),
        )
        for scheme in PACKAGES
    ],
)
def store(request, tmp_path_factory):
    """Scheme, and what to set for the store: two engines in the folders of two minutes, and two states."""
    directory = tmp_path_factory.mktemp("otlp")
    record_two_minutes(directory, "2026/11/22/05/{minute:02}")
    (directory / "states").mkdir()
    for number in range(2):
        (directory / "states" / f"{number}.bin").write_bytes(
            state_of(f"engine-{number}", number, rows=300, begin_ns=BEGIN_NS)
        )
    command = [sys.executable, "-m", "tests.support.store_servers", request.param, str(directory)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield request.param, {**os.environ, **json.loads(server.stdout.readline())}
    finally:
        server.communicate(timeout=60)


def run(environment, *arguments):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert "INFO azure" not in done.stderr, "its library tells of every request"
    return done.stdout


@pytest.mark.timeout(600)
def test_recordings_rows_and_states_are_read_and_written_there(store, tmp_path):
    scheme, environment = store
    replay = ["-m", "collector", "fleet", "replay"]
    said = run(
        environment, *replay, f"{scheme}://bucket/otlp/2026", "-o", tmp_path, "--rows", f"{scheme}://bucket/rows"
    )
    assert said.startswith("2 files, 2 engines, ")
    assert "2 files, " in run(environment, *replay, f"{scheme}://bucket/otlp/2026/*/*/*/*/*.binpb", "-o", tmp_path)
    listed = f"import fsspec; print(*fsspec.filesystem('{scheme}').find('bucket/rows'))"
    assert sum("/target=step_time/" in name for name in run(environment, "-c", listed).split()) == 2
    pulled = run(environment, "-m", "collector", "fleet", "pull", f"{scheme}://bucket/otlp/states", "-o", tmp_path)
    assert pulled.startswith("2 sources: 2 merged")
