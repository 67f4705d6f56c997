"""The command as a process: exit codes, sentences, signals."""

import gzip
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from collector.cli import main
from collector.commands.demo import demo, read_tape
from tests.support.clocks import eventually
from tests.support.command_lines import spoken
from tests.support.paths import DATA
from tests.support.processes import TRACEFIT, environment, running_process, tracefit
from tests.support.recordings import messages
from tests.support.sidecars import as_json, call_export, metric, running_sidecar
from tests.support.step_exports import delimited, make_export, otlp_json


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

    with running_process(tmp_path, LEARNERS="[rls]") as (process, grpc_port, http_port, _):
        callers = [threading.Thread(target=load, args=(worker,), daemon=True) for worker in range(3)]
        for caller in callers:
            caller.start()
        eventually(lambda: metric(http_port, 'tracefit_receiver_spans_total{outcome="accepted",transport="grpc"}') > 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for caller in callers:
            caller.join(60)
    assert len(acknowledged) > 30
    rows = sum(
        config["targets"]["step_time"]["models"]["portable"]["rows"]
        for config in as_json(tmp_path / "snapshot.json")["configs"]
    )
    assert rows >= 20 * len(acknowledged) - 3, "n consecutive steps of an engine are n - 1 rows"


def test_a_second_signal_ends_at_once_and_the_first_may_come_twice(tmp_path):
    with (
        running_process(tmp_path) as (process, grpc_port, *_),
        grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=300)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING, "and the open call holds it up"
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("key", "port", "whom"), [("LISTEN", "grpc_port", "OTLP/gRPC"), ("PAGES", "http_port", "the pages")]
)
def test_a_port_in_use_is_exit_1_and_one_sentence_and_leaves_no_server_behind(tmp_path, capsys, key, port, whom):
    with running_sidecar(tmp_path / "a") as sidecar:
        taken = f"127.0.0.1:{getattr(sidecar, port)}"
        ports = {"LISTEN": "127.0.0.1:0", "PAGES": "127.0.0.1:0", key: taken}
        words = [word for name, value in ports.items() for word in (f"--{name.lower()}", value)]
        assert main(["run", *words, "--dir", str(tmp_path / "b")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: cannot listen on {taken} for {whom}")
    assert said.endswith(f"set TRACEFIT_{key}=HOST:PORT")


def test_a_process_ends_with_the_exit_code_of_its_command():
    ended = tracefit()
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)


CHECK, RUN, REPLAY = (
    ("config", "check"),
    ("run",),
    ("replay", str(DATA / "c7_async_sim" / "otlp.pb.gz"), "--snapshot", "y"),
)


@pytest.mark.parametrize(
    ("command", "text", "sentence"),
    [
        (RUN, "recievers: {}", "recievers: unknown key"),
        (REPLAY, "queue_mb: 1", "queue_mb: unknown key; did you mean 'queue_mib'?"),
        (CHECK, "feature_sets: [magic]", "feature_sets: 'magic' is not"),
        (CHECK, "token_file: /nope", "token_file: "),
        (CHECK, "pages_token_file: /nope", "pages_token_file: "),
        (CHECK, "tls_cert_file: /nope\ntls_key_file: /nope", "tls_cert_file: "),
        (CHECK, "tls_client_ca_file: /nope", "tls_cert_file: "),
        (CHECK, "scrape_token_file: /nope", "scrape_token_file: "),
        (CHECK, "ca_file: /nope", "ca_file: "),
        (CHECK, "forward: 'grpc://[1.2.3.4]:4317'", "forward: An IPv4 address cannot be in brackets"),
    ],
)
def test_bad_configuration_is_exit_78_and_one_sentence_naming_the_key(tmp_path, command, text, sentence, capsys):
    """What would end the start is found by ``config check``, too."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert main([*command, "--config", str(file)]) == 78
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"config error: {sentence}")


def test_replay_shows_progress_and_a_recording_as_json_lines_teaches_the_same(tmp_path, data_dir, capsys, monkeypatch):
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")
    recording = data_dir / "c1_mixed" / "otlp.pb.gz"
    lines = tmp_path / "traces.json"
    lines.write_bytes(b"".join(otlp_json(ExportTraceServiceRequest.FromString(each)) for each in messages(recording)))
    targets = []
    for source in (recording, lines):
        assert main(["replay", str(source), "--snapshot", str(tmp_path / "s.json")]) == 0
        said = capsys.readouterr()
        assert "step_time" in said.out
        (config,) = as_json(tmp_path / "s.json")["configs"]
        targets.append(config["targets"])
    assert targets[0] == targets[1]
    features = targets[0]["step_time"]["models"]["portable"]["features"]
    assert 500 <= features[1]["coefficient"] <= 650, "0.5 to 0.65 ms a prompt token"


NO_RECORDING = "neither length-delimited OTLP nor lines of OTLP/JSON, KV events, pages or passes, plain or in gzip"
OTHERS = (
    b"",
    b"hello, I am a text\n",
    gzip.compress(random.Random(1).randbytes(5000)),
    b"\x28\xb5\x2f\xfd" + bytes(40),
    b"\0\0\1\x2c" + bytes(300),
    b'{"resourceSpans": 3}\n',
    b'{"resourceMetrics":[]}\n{"resourceLogs":[]}\n',
    b'{\n  "resourceSpans": []\n}\n',
)
UNLEARNABLE = gzip.compress(delimited(make_export(steps_per_span=1)))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [*((each, NO_RECORDING) for each in OTHERS), (UNLEARNABLE, "nothing was learned from 1 spans")],
)
def test_a_file_that_teaches_nothing_is_exit_1_says_so_and_leaves_no_snapshot(tmp_path, content, sentence, capsys):
    file = tmp_path / "file"
    file.write_bytes(content)
    assert main(["replay", str(file), "--snapshot", str(tmp_path / "s.json")]) == 1
    assert capsys.readouterr().err.count(sentence) == 1
    assert not (tmp_path / "s.json").exists()


def test_the_demo_runs_from_start_to_final_table(tmp_path, data_dir):
    code, said, _ = spoken(demo, read_tape(data_dir / "c1_mixed" / "otlp.pb.gz"), 600.0, tmp_path)
    text = "\n".join(said)
    assert code == 0, text
    assert re.search(r"http://127.0.0.1:\d+/metrics", text)
    assert re.search(r"prefill_tokens\s+5\d\d(\.\d+)? µs/token ± ", text)
    path = Path(re.search(r"snapshot: (\S+)", text)[1])
    assert path == tmp_path / "snapshot.json"
    assert as_json(path)["configs"][0]["engines"][0]["last_step"] == 1526


def test_an_interrupted_demo_drains_its_sidecar_and_ends_cleanly(tmp_path):
    process = subprocess.Popen(
        [*TRACEFIT, "demo", "--speed", "20", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        # an interrupt between two lines of coverage's own leaves its lock taken for good
        env=environment(TRACEFIT_LEARNERS="[rls]", COVERAGE_PROCESS_CONFIG="", COVERAGE_PROCESS_START=""),
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
