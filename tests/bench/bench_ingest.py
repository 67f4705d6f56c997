"""What receiving costs, every number beside its target: ``make bench WHAT=ingest``; names of sections run only those.

The server runs on CPU 0, the load generator on CPU 1; a busy machine spoils rates and latencies, CPU per step and
ratios less. Exit 1 if a number misses its target. ``--record`` writes what was measured to docs/figures.json.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.bench.decode_cost import measure
from tests.bench.figures import record
from tests.bench.ingest_load import SERVER_CPU, bare, pinned, send, sidecar, snapshot
from tests.bench.send_load import METHOD

BULK_PROFILE = ("--profile", "bulk")
FAST = {"FEATURE_SETS": "[portable]"}
BULK = {"steps_per_sec": 0, "duration": 8, "settle_s": 1, "workers": 2}
DECODE_TARGETS_US = {100: 2.1, 1000: 1.05, 5000: 1.13}


class Board:
    """Numbers beside their targets."""

    def __init__(self):
        self.missed = 0
        self.rows = []
        self.figures = {}

    def at_most(self, name, value, target, unit=""):
        self._put(name, value, "<=", target, unit, value <= target)

    def at_least(self, name, value, target, unit=""):
        self._put(name, value, ">=", target, unit, value >= target)

    def keep(self, name, value):
        """A figure without a target."""
        self.figures[name] = value

    def note(self, text):
        sys.stdout.write(f"      {text}\n")
        sys.stdout.flush()

    def print_table(self):
        """All numbers as a table of a document."""
        head = ("| what | measured | required | |", "|---|---|---|---|")
        sys.stdout.write("\n".join(("", *head, *self.rows, "")))

    def _put(self, name, value, sign, target, unit, good):
        self.missed += not good
        self.figures[name] = [value, target]
        self.rows.append(f"| {name} | {value:.2f} {unit} | {sign} {target:g} | {'holds' if good else 'misses'} |")
        sys.stdout.write(f"{'ok  ' if good else 'MISS'}  {name:<66} {value:>10.2f}  {sign} {target:g} {unit}\n")
        sys.stdout.flush()


def decoding(board):
    for steps, target_us in DECODE_TARGETS_US.items():
        cost = measure(steps)
        board.at_most(f"decode, {steps} steps a call", cost["columnar"], target_us, "us/step")
        board.note(f"plain decoder {cost['plain']:.1f}, parse and a dict per event {cost['dict']:.1f} us/step")


def bulk(board):
    with bare("reference") as server:
        reference = send(server, **BULK)["server"]["us_per_step"]
    with bare("intake") as server:
        taken = send(server, **BULK)
    with tempfile.TemporaryDirectory() as directory, sidecar(*BULK_PROFILE, directory=directory, **FAST) as server:
        learned = send(server, **BULK)
    cost = learned["server"]["us_per_step"]
    board.at_most("receive, decode, admit: 1000 steps a call", taken["server"]["us_per_step"], 1.9, "us/step")
    board.at_most("bulk profile, into the learner: 1000 steps a call", cost, 4, "us/step")
    board.at_least("bulk profile, accepted", learned["steps_per_sec"], 250_000, "steps/s")
    board.at_least("bulk profile, by the CPU it took", 1e6 / cost, 250_000, "steps/s of one core")
    board.at_most("bulk profile against the plain reference", cost / reference, 1 / 3, "")
    board.note(
        f"plain reference {reference:.1f} us/step; {taken['steps_per_sec']:.0f} steps/s without join and learning"
    )


def default_profile(board):
    usual = {"steps_per_sec": 1000, "workers": 1, "requests": True, "duration": 30}
    profiles = (("learners: [rls]", {"LEARNERS": "[rls]"}, 20, 125), ("shipped default", {}, 50, 205))
    for name, settings, target, loaded_mb in profiles:
        with tempfile.TemporaryDirectory() as directory, sidecar(directory=directory, **settings) as server:
            time.sleep(2)
            idle_mb, before_s = server.rss_mb(), server.cpu_s()
            time.sleep(10)
            idle = (server.cpu_s() - before_s) * 100
            report = send(server, **usual)["server"]
        if settings:
            board.at_most("idle", idle, 2, "millicores")
            board.at_most("RSS idle", idle_mb, 85, "MB")
        board.at_most(f"1000 steps/s + 20 requests/s, {name}", report["millicores"], target, "millicores")
        board.at_most(f"RSS loaded, {name}", report["rss_max_mb"], loaded_mb, "MB")


def large_export(board):
    with tempfile.TemporaryDirectory() as directory, sidecar(*BULK_PROFILE, directory=directory, **FAST) as server:
        report = send(server, steps_per_sec=0, spans_per_rpc=318, pool_rpcs=1, max_rpcs=2, workers=1, settle_s=3)
    grown_mb = report["server"]["rss_max_mb"] - report["server"]["rss_before_mb"]
    board.at_most("24.5 MB exports: steps not accepted", report["dropped_steps"], 0)
    board.at_most("24.5 MB exports: RSS growth", grown_mb, 120, "MB")


FOREIGN_CALLS, FOREIGN_SPANS, FOREIGN_CALLS_PER_S = 200, 500, 20.0


def foreign(board):
    """Spans that are none of ours, at the rate of the Collector's own load tests (which allow 20 % of a core)."""
    with tempfile.TemporaryDirectory() as directory, sidecar(directory=directory) as server:
        cost_us = foreign_us(server)
    rate = FOREIGN_CALLS_PER_S * FOREIGN_SPANS
    board.at_most(f"foreign spans, {rate:.0f}/s, {FOREIGN_SPANS} a call", cost_us, 4, "us/span")


def foreign_us(server):
    """CPU per span of a server that gets them."""
    payload = foreign_export(FOREIGN_SPANS, {"net.sock.peer.addr": "1.2.3.4", "peer.service": "telemetrygen-client"})
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary(METHOD)
        call(payload, timeout=10, wait_for_ready=True)
        before_s, begun_s = server.cpu_s(), time.monotonic()
        for number in range(FOREIGN_CALLS):
            time.sleep(max(0.0, begun_s + number / FOREIGN_CALLS_PER_S - time.monotonic()))
            call(payload, timeout=10)
    time.sleep(1)
    return (server.cpu_s() - before_s) / (FOREIGN_CALLS * FOREIGN_SPANS) * 1e6


def foreign_export(spans, attributes):
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = "telemetrygen"
    for number in range(spans):
        span = scope.spans.add(name="okey-dokey-0", kind=2, trace_id=bytes(16), span_id=number.to_bytes(8, "big"))
        span.start_time_unix_nano, span.end_time_unix_nano = 1_795_000_000_000_000_000, 1_795_000_000_000_123_000
        for key, value in attributes.items():
            span.attributes.add(key=key).value.string_value = value
    return request.SerializeToString()


def latency(board):
    with tempfile.TemporaryDirectory() as directory, sidecar(*BULK_PROFILE, directory=directory, **FAST) as server:
        found = send(server, steps_per_sec=20_000, spans_per_rpc=1, workers=4, duration=20)["latency_ms"]
    board.at_most("20,000 steps/s while learning: p50", found["p50"], 1, "ms")
    board.at_most("20,000 steps/s while learning: p99", found["p99"], 10, "ms")


def overload(board):
    with tempfile.TemporaryDirectory() as directory, sidecar(directory=directory, LEARNERS="[rls]") as server:
        free = send(server, steps_per_sec=0, duration=4, workers=2)
        rate = 2 * free["steps_per_sec"]
        report = send(server, steps_per_sec=rate, workers=6, spans_per_rpc=5, duration=30)
    board.keep("overload: steps/s offered", rate)
    board.at_most("overload, twice the capacity for 30 s: steps lost", report["dropped_steps"], 0)
    grown_mb = report["server"]["rss_max_mb"] - report["server"]["rss_before_mb"]
    board.at_most("overload: RSS growth (queue bound 16.8 + 25)", grown_mb, 41.8, "MB")
    board.note(f"{report['steps_per_sec']:.0f} steps/s accepted, {report['retries']} retries")


def coefficients(board):
    for rate in (1.0, 0.3):
        with tempfile.TemporaryDirectory() as directory:
            with sidecar(*BULK_PROFILE, directory=directory, **FAST) as server:
                report = send(server, steps_per_sec=5000, workers=1, duration=4 / rate, sample_rate=rate)
                server.stop()
            model = snapshot(directory)["configs"][0]["targets"]["step_time"]["models"]["portable"]
        for feature in model["features"]:
            off = abs(feature["coefficient"] / report["beta_us"][feature["name"]] - 1) * 100
            board.at_most(f"{feature['name']} after 20,000 steps, sampled at {rate:g}", off, 2, "% off")


def start(board):
    with tempfile.TemporaryDirectory() as directory:
        began_s = time.monotonic()
        with sidecar(directory=directory, LEARNERS="[rls]") as server:
            up_s = time.monotonic() - began_s
            report = send(server, max_rpcs=1, workers=1, spans_per_rpc=1)
        board.at_most("start to first export accepted", up_s + report["latency_ms"]["max"] / 1e3, 1.5, "s")
    code = "import time, collector.app; print(time.process_time())"
    costs = []
    for _ in range(3):
        process = pinned(SERVER_CPU, "-c", code, stdout=subprocess.PIPE)
        costs.append(float(process.communicate()[0]))
    board.at_most("import", sorted(costs)[1], 0.5, "s CPU")


def pressure():
    """How much of the last minute something waited for a CPU, as the kernel has it; it includes this benchmark."""
    file = Path("/proc/pressure/cpu")
    return re.search(r"avg60=([\d.]+)", file.read_text())[1] if file.exists() else "nan"


def pace():
    """CPU seconds of ten million additions: how fast this machine is just now, which differs by a third in minutes."""
    code = "import time; s = 0\nfor i in range(10**7): s += i\nprint(round(time.process_time(), 2))"
    return pinned(SERVER_CPU, "-c", code, stdout=subprocess.PIPE).communicate()[0].strip()


SECTIONS = {
    section.__name__: section
    for section in (decoding, bulk, default_profile, large_export, foreign, latency, overload, coefficients, start)
}


def measure_sections(run, sections, description):
    """Run the sections that the command line names; their board, after the last of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sections", nargs="*", choices=[[], *sections], help="default: all")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    args = parser.parse_args()
    board = Board()
    for name in args.sections or list(sections):
        board.figures = {}
        sections[name](board)
        waited = pressure()
        board.note(f"{name}: tasks waited for a CPU in {waited} % of the last minute; 10^7 additions {pace()} s")
        if args.record:
            record(f"{run} {name}", {**board.figures, "waited_percent": float(waited)})
    return board


def main():
    return 1 if measure_sections("ingest", SECTIONS, __doc__).missed else 0


if __name__ == "__main__":
    sys.exit(main())
