"""The command as a process: exit codes, sentences, signals."""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.recordings import Recording
from tests.support.clocks import eventually
from tests.support.paths import ROOT
from tests.support.sidecars import as_json, call_export, get, metric, running_sidecar
from tests.support.step_exports import make_export, otlp_json, write_recording

HOME = ROOT
TRACEFIT = [sys.executable, "-m", "collector"]


def environment(**variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRACEFIT_")}
    return {**clean, "PYTHONPATH": str(HOME), **variables}


def tracefit(*arguments, **variables):
    return subprocess.run(
        [*TRACEFIT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(**variables),
    )


@contextmanager
def running_process(directory, **variables):
    """`tracefit run` on free ports, which it tells on stderr."""
    settings = environment(
        TRACEFIT_LISTEN="127.0.0.1:0",
        TRACEFIT_LISTEN_HTTP="127.0.0.1:0",
        TRACEFIT_PAGES="127.0.0.1:0",
        TRACEFIT_DIRECTORY=str(directory),
        TRACEFIT_LEARNERS="[rls]",
        **variables,
    )
    process = subprocess.Popen([*TRACEFIT, "run"], stderr=subprocess.PIPE, text=True, env=settings)
    try:
        said = next(filter(None, (re.search(r"port (\d+), pages on port (\d+)", line) for line in process.stderr)))
        yield process, int(said[1]), int(said[2])
    finally:
        process.kill()
        process.communicate()


def test_terminated_under_load_no_acknowledged_export_is_lost(tmp_path):
    acknowledged = []

    def load(worker):
        with_steps = range(worker * 1_000_000 + 1, (worker + 1) * 1_000_000, 20)
        for first in with_steps:
            payload = make_export(first_step=first, steps_per_span=20, instance=f"engine-{worker}").SerializeToString()
            try:
                call_export(grpc_port, payload, timeout_s=60, wait=False)
            except (grpc.RpcError, ValueError):
                return
            acknowledged.append((worker, first))

    with running_process(tmp_path) as (process, grpc_port, http_port):
        callers = [threading.Thread(target=load, args=(worker,), daemon=True) for worker in range(3)]
        for caller in callers:
            caller.start()
        eventually(lambda: metric(http_port, 'tracefit_receiver_accepted_spans_total{transport="grpc"}') > 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for caller in callers:
            caller.join(60)
    learned = {
        engine["instance"]: engine["last_step"]
        for config in as_json(tmp_path / "snapshot.json")["configs"]
        for engine in config["engines"]
    }
    assert len(acknowledged) > 30
    for worker in range(3):
        last_step = max(first for owner, first in acknowledged if owner == worker) + 19
        assert learned[f"engine-{worker}"] >= last_step
    rows = sum(
        config["targets"]["step_time"]["models"]["portable"]["rows"]
        for config in as_json(tmp_path / "snapshot.json")["configs"]
    )
    assert rows >= 20 * len(acknowledged) - 3, "n consecutive steps of an engine are n - 1 rows"


def test_a_second_signal_ends_at_once(tmp_path):
    with (
        running_process(tmp_path) as (process, grpc_port, _),
        grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=300)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING, "and the open call holds it up"
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 128 + signal.SIGINT


def test_a_port_in_use_is_exit_1_and_one_sentence(tmp_path):
    with running_sidecar(tmp_path / "a") as sidecar:
        taken = f"127.0.0.1:{sidecar.grpc_port}"
        ended = tracefit(
            "run",
            TRACEFIT_LISTEN=taken,
            TRACEFIT_LISTEN_HTTP="127.0.0.1:0",
            TRACEFIT_PAGES="127.0.0.1:0",
            TRACEFIT_DIRECTORY=str(tmp_path / "b"),
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: cannot listen on {taken} for OTLP/gRPC")
    assert "Traceback" not in ended.stderr


CHECK, RUN, REPLAY = ("config", "check"), ("run",), ("replay", "x", "--snapshot", "y")


@pytest.mark.parametrize(
    ("command", "text", "sentence"),
    [
        (RUN, "recievers: {}", "config error: recievers: unknown key"),
        (CHECK, "queue_mb: 1", "config error: queue_mb: unknown key; did you mean 'queue_mib'?"),
        (REPLAY, "queue_mb: 1", "config error: queue_mb: unknown key; did you mean 'queue_mib'?"),
        (CHECK, "message_max_mib: 0", "config error: message_max_mib: expected int >= 1"),
        (REPLAY, "learners: [magic]", "config error: learners: 'magic' is not"),
        (RUN, "feature_sets: [magic]", "config error: feature_sets: 'magic' is not"),
        (CHECK, "feature_sets: [magic]", "config error: feature_sets: 'magic' is not"),
    ],
)
def test_bad_configuration_is_exit_78_and_one_sentence_naming_the_key(tmp_path, command, text, sentence):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    ended = tracefit(*command, "--config", file)
    assert ended.returncode == 78
    assert sentence in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_in_a_pod_a_bad_configuration_does_not_end_the_process(tmp_path):
    """A start with a good one; then with bad ones, for which the defaults hold, and that is said."""
    file = tmp_path / "config.yaml"
    variables = {"TRACEFIT_CONFIG": str(file), "TRACEFIT_ON_ERROR": "degrade"}
    for text, key in (
        ("allowed_lateness_s: 15", ""),
        ("feature_sets: [magic]", "feature_sets"),
        ("scrape_token_file: /nope", "scrape_token_file"),
    ):
        file.write_text(text)
        with running_process(tmp_path, **variables) as (_, _, http_port):
            assert metric(http_port, "tracefit_config_degraded") == bool(key)
            if key:
                assert f"the defaults hold: {key}" in get(http_port, "/readyz").decode()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("token_file: /nope", "token_file"),
        ("pages_token_file: /nope", "pages_token_file"),
        ("tls_cert_file: /nope\ntls_key_file: /nope", "tls_cert_file"),
        ("tls_client_ca_file: /nope", "tls_cert_file"),
        ("scrape_token_file: /nope", "scrape_token_file"),
        ("ca_file: /nope", "ca_file"),
        ("listen: 0.0.0.0:4318", "listen_http"),
    ],
)
def test_check_config_finds_what_would_end_the_start(tmp_path, text, key):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    ended = tracefit("config", "check", "--config", file)
    assert ended.returncode == 78
    assert ended.stderr.startswith(f"config error: {key}: ")


def test_usage_errors_are_exit_2():
    assert tracefit("replay").returncode == 2
    assert tracefit().returncode == 2


def test_replay_learns_from_the_bundled_recording_and_shows_progress(tmp_path, data_dir):
    out = tmp_path / "s.json"
    ended = tracefit("replay", data_dir / "c1_mixed" / "otlp.pb.gz", "--snapshot", out)
    assert ended.returncode == 0, ended.stderr
    model = as_json(out)["configs"][0]["targets"]["step_time"]["models"]["portable"]
    coefficients = {feature["name"]: feature["coefficient"] for feature in model["features"]}
    assert 500 <= coefficients["prefill_tokens"] <= 650, "0.5 to 0.65 ms a token"
    assert "29 exports, 328 spans" in ended.stderr
    assert "step_time" in ended.stdout


def test_a_recording_as_json_lines_teaches_the_same_as_its_protobuf(tmp_path, data_dir):
    recording = data_dir / "c1_mixed" / "otlp.pb.gz"
    lines = tmp_path / "traces.json"
    requests = [ExportTraceServiceRequest.FromString(timed.export.payload) for timed in Recording(recording, print)]
    lines.write_bytes(b"".join(otlp_json(request) for request in requests))
    targets = []
    for source in (recording, lines):
        assert tracefit("replay", source, "--snapshot", tmp_path / "s.json").returncode == 0
        (config,) = as_json(tmp_path / "s.json")["configs"]
        targets.append(config["targets"])
    assert targets[0] == targets[1]


def test_replay_of_nothing_learnable_is_exit_1_and_leaves_no_snapshot(tmp_path):
    recording = write_recording(tmp_path / "one.pb.gz", make_export(steps_per_span=1))
    ended = tracefit("replay", recording, "--snapshot", tmp_path / "s.json")
    assert ended.returncode == 1
    assert "nothing was learned from 1 spans" in ended.stderr
    assert not (tmp_path / "s.json").exists()


NO_RECORDING = "neither length-delimited OTLP traces nor lines of OTLP/JSON, KV events, pages or passes"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "error: cannot read"),
        (b"", NO_RECORDING),
        (b"hello, I am a text\n", NO_RECORDING),
        (
            gzip.compress(random.Random(1).randbytes(5000)),
            NO_RECORDING,
        ),
        (b'{"resourceSpans": 3}\n', NO_RECORDING),
    ],
)
def test_a_file_that_is_no_recording_is_exit_1_and_says_so(tmp_path, content, sentence):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    ended = tracefit("replay", file, "--snapshot", tmp_path / "s.json")
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_demo_runs_from_start_to_final_table(tmp_path, data_dir):
    ended = tracefit(
        "demo", "--recording", data_dir / "c1_mixed" / "otlp.pb.gz", "--speed", "60", "--directory", tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"http://127.0.0.1:\d+/metrics", ended.stdout)
    assert re.search(r"prefill_tokens\s+5\d\d(\.\d+)? ± ", ended.stdout)
    path = Path(re.search(r"snapshot: (\S+)", ended.stdout)[1])
    assert path == tmp_path / "snapshot.json"
    assert as_json(path)["configs"][0]["engines"][0]["last_step"] == 1526


def test_an_interrupted_demo_drains_its_sidecar_and_ends_cleanly(tmp_path):
    process = subprocess.Popen(
        [*TRACEFIT, "demo", "--speed", "20", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    with process:
        said = iter(process.stdout)
        assert any("rows" in line for line in said), "the table has begun"
        os.killpg(process.pid, signal.SIGINT)
        rest = "".join(said)
        assert process.wait(60) == 0
    assert "snapshot: " in rest
    assert "Traceback" not in rest
    assert (tmp_path / "snapshot.json").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_recording_is_sent_to_a_sidecar_that_runs_already_until_a_signal(tmp_path, number):
    with running_sidecar(tmp_path) as sidecar:
        process = subprocess.Popen(
            [*TRACEFIT, "demo", "--to", f"127.0.0.1:{sidecar.grpc_port}"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        with process:
            accepted = 'tracefit_receiver_accepted_spans_total{transport="grpc"}'
            eventually(lambda: metric(sidecar.http_port, accepted) > 0)
            process.send_signal(number)
            assert "round 1" in process.stdout.read()
            assert process.wait(timeout=100) == 0
