"""What needs the extra `fleet`: replays on Ray, from S3, and rows as Parquet; ``make test-fleet`` brings it."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.fleets import record_two_minutes
from tests.support.paths import ROOT

TASKS = {"cut", "learn_references"}
ABSENT = [name for name in ("ray", "pyarrow", "s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("FLEET_TEST") != "1" and bool(ABSENT),
        reason=f"{', '.join(ABSENT)} not installed: fleet replay on Ray and S3 is NOT tested here (make test-fleet)",
    ),
]
KEYS = {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto", "AWS_DEFAULT_REGION": "us-east-1"}


def run(*arguments, environment, module="collector"):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


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
    return {**os.environ, **KEYS, "HOME": home, "OPENBLAS_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def s3(recording, environment):
    """What to set for the store."""
    command = [sys.executable, "-m", "tests.support.s3_server", str(recording)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        url = server.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        yield {**environment, "AWS_ENDPOINT_URL": url}
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()


def files_below(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "tracefit.lock"
    }


def test_recordings_in_a_store_become_the_fleets_files_and_rows(s3, tmp_path):
    from pyarrow import dataset

    outs = []
    for name in ("once", "again"):
        rows = tmp_path / f"rows-{name}"
        said = run("fleet", "replay", "s3://bucket/otlp", "-o", tmp_path / name, "--rows", rows, environment=s3)
        assert said.startswith("2 files, 2 engines, ")
        outs.append((files_below(tmp_path / name), files_below(rows)))
    assert outs[0] == outs[1]
    assert "snapshot.json" in outs[0][0]
    assert sum(name.startswith("states/") for name in outs[0][0]) == 1
    table = dataset.dataset(tmp_path / "rows-once", partitioning="hive").to_table()
    assert set(table["target"].to_pylist()) >= {"step_time", "schedule_time", "queue_wait"}
    steps = table.filter(dataset.field("target") == "step_time")
    assert len(set(steps["engine"].to_pylist())) == 2
    assert set(steps["recording"].to_pylist()) == {"s3://bucket/otlp/traces"}
    assert all(each > 0 for each in steps["elapsed_us"].to_pylist())
    assert steps["requests"].null_count < steps.num_rows
    assert steps["prompt_tokens"].null_count == steps.num_rows


def test_rows_go_to_a_store_too(s3, tmp_path):
    run("fleet", "replay", "s3://bucket/otlp", "-o", tmp_path, "--rows", "s3://bucket/rows", environment=s3)
    listed = "import s3fs; print(*s3fs.S3FileSystem().find('bucket/rows'))"
    command = [sys.executable, "-c", listed]
    names = subprocess.run(command, capture_output=True, text=True, check=True, env=s3).stdout.split()
    assert sum("/target=step_time/" in name for name in names) == 2


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
    run("fleet", "replay", recording, "-o", tmp_path / "calm", environment=environment)
    stop, killed = threading.Event(), set()
    killer = threading.Thread(target=kill_workers, args=(stop, killed))
    killer.start()
    try:
        run("fleet", "replay", recording, "-o", tmp_path / "killed", environment=environment)
    finally:
        stop.set()
        killer.join()
    assert killed == TASKS
    assert files_below(tmp_path / "killed") == files_below(tmp_path / "calm")


def test_a_cluster_that_is_not_there_is_said(recording, environment, tmp_path):
    command = [sys.executable, "-m", "collector", "fleet", "replay", str(recording), "-o", str(tmp_path)]
    command += ["--ray", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 1
    assert "error: no Ray at nonsense" in done.stderr
    assert "Traceback" not in done.stderr
