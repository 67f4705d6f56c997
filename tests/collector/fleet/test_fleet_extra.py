"""What needs the extra `fleet`: replays on Ray, and from S3; ``make test-fleet`` brings it."""

import contextlib
import importlib.util
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.support.fleets import record_two_minutes
from tests.support.processes import tracefit

TASKS = {"cut", "learn_bucket"}
ABSENT = [name for name in ("ray", "s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("FLEET_TEST") != "1" and bool(ABSENT),
        reason=f"{', '.join(ABSENT)} not installed: fleet replay on Ray and S3 is NOT tested here (make test-fleet)",
    ),
]
KEYS = {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto", "AWS_DEFAULT_REGION": "us-east-1"}


def replay(*arguments, environment, code=0):
    """What is said and what is noted."""
    done = tracefit("fleet", "replay", *arguments, **environment)
    assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two engines, in the folders of two minutes."""
    directory = tmp_path_factory.mktemp("otlp")
    record_two_minutes(directory, "year=2026/month=11/day=22/hour=05/minute={minute:02}")
    return directory


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Ray keeps a token in the home directory."""
    home = str(tmp_path_factory.mktemp("home"))
    return {**KEYS, "HOME": home, "OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def s3(recording, environment):
    """What to set for the store, in which the recording is."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        storage = s3fs.S3FileSystem(endpoint_url=url, key="moto", secret="moto")
        storage.mkdir("bucket")
        storage.put(f"{recording}/", "bucket/otlp/", recursive=True)
        yield {**environment, "AWS_ENDPOINT_URL": url}
    finally:
        server.stop()


def files_below(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "tracefit.lock"
    }


def test_recordings_in_a_store_are_learned_as_those_of_a_directory(s3, recording, environment, tmp_path):
    said = []
    for name, place, settings in (("stored", "s3://bucket/otlp", s3), ("local", recording, environment)):
        said.append(replay(place, "-o", tmp_path / name, environment=settings)[0].splitlines()[0])
        written = files_below(tmp_path / name)
        assert "snapshot.json" in written
        assert sum(file.startswith("states/") for file in written) == 1
    assert said[0].startswith("2 files, 2 engines, ")
    assert said[0] == said[1]


def kill_workers(stop, killed):
    """Kill the first process of each of Ray's tasks of ours, as soon as it is at work."""
    while not stop.is_set():
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = (process / "cmdline").read_text(errors="replace")
                task = next((task for task in TASKS - killed if title.startswith(f"ray::{task}")), None)
                if task:
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.add(task)
        stop.wait(0.03)


def test_workers_that_are_killed_change_nothing(recording, environment, tmp_path):
    replay(recording, "-o", tmp_path / "calm", environment=environment)
    stop, killed = threading.Event(), set()
    killer = threading.Thread(target=kill_workers, args=(stop, killed))
    killer.start()
    try:
        replay(recording, "-o", tmp_path / "killed", environment=environment)
    finally:
        stop.set()
        killer.join()
    assert killed == TASKS
    assert files_below(tmp_path / "killed") == files_below(tmp_path / "calm")


def test_a_cluster_that_is_not_there_is_said(recording, environment, tmp_path):
    _, noted = replay(recording, "-o", tmp_path, "--ray", "nonsense", environment=environment, code=1)
    assert "error: no Ray at nonsense" in noted
    assert "Traceback" not in noted
