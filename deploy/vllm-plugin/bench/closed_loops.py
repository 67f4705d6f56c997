"""``make bench WHAT=vllm``: what tracefit says of a real vLLM's closed loops, beside what their clients measure.

    PYTHONPATH=. python deploy/vllm-plugin/bench/closed_loops.py [--minutes 5] [--loop-s 45] [--record]

A stock vLLM serves a tiny model on this CPU (``make demo-vllm``). Three sidecars learn minutes of changing traffic, one
source each: passes by the plugin, vLLM's own request spans, its page. Then each snapshot is asked for TTFT, ITL and E2E
of closed loops that were not in the traffic, and clients that stream run them. A loop counts without its first third,
for its clients begin one by one. Nothing but vLLM and its clients should run: they share the machine.

    ITL, TTFT, E2E   mean error over the loops in %, and the worst of them
    inside           share of the answers, of loops called usable, whose 80 % band has the mean that was measured
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

import tracefit
from tests.bench.figures import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from environment import prepare
from load import VOCABULARY
from server import free_port, get, process, vllm

from demo import ENVIRONMENT, print_line, scraping, sidecar

CLIENTS: Final = (1, 3, 6, 2, 10, 4, 16)
MIXES: Final = ((150, 60), (60, 120), (400, 30), (250, 100))
THINK_S: Final = (0.0, 0.3)
PHASE_S: Final = 12.0
LOOPS: Final = ((1, 150, 60), (2, 300, 40), (4, 100, 100), (8, 200, 60), (12, 80, 120), (5, 450, 30))
"""Clients, mean prompt tokens and mean output tokens."""
SPREAD: Final = 0.3
ASKED: Final = ("itl", "ttft", "e2e")


class Seen(NamedTuple):
    """One request as its client saw it, in microseconds, and its sizes; or the means of several."""

    itl: float
    ttft: float
    e2e: float
    prompt: float
    output: float


class Clients:
    """Clients of one server, that stream."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._rng = random.Random(5)

    def loop(self, clients: int, prompt: float, output: float, seconds: float, think_s: float = 0.0) -> list[Seen]:
        """So many send again when they have their answer and have thought; what they saw after the first third."""
        seen: list[Seen] = []
        begin = time.monotonic()

        def client(number: int) -> None:
            time.sleep(seconds / 6 * number / clients)
            while time.monotonic() < begin + seconds:
                sent = time.monotonic()
                one = self._request(self._size(prompt), self._size(output))
                if sent > begin + seconds / 3 and one.output > 1:
                    seen.append(one)
                time.sleep(think_s and self._rng.expovariate(1.0 / think_s))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    def _size(self, mean: float) -> int:
        return max(2, round(mean * self._rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))

    def _request(self, prompt: int, output: int) -> Seen:
        tokens = [self._rng.randrange(300, VOCABULARY) for _ in range(prompt)]
        asked = {"model": "tiny", "prompt": tokens, "max_tokens": output, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        times = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
        connection.close()
        first, last = times[0] - begin, times[-1] - begin
        return Seen(1e6 * (last - first) / (output - 1), 1e6 * first, 1e6 * last, prompt, output)


def learn(clients: Clients, minutes: float) -> None:
    """Changing traffic."""
    begin, phase = time.monotonic(), 0
    while time.monotonic() < begin + 60.0 * minutes:
        prompt, output = MIXES[phase % len(MIXES)]
        clients.loop(CLIENTS[phase % len(CLIENTS)], prompt, output, PHASE_S, THINK_S[phase % len(THINK_S)])
        phase += 1


def examine(snapshots: dict[str, tracefit.Snapshot], clients: Clients, seconds: float) -> dict[str, list[float]]:
    """By source: mean and worst error of each time; per cent of answers inside, and of loops usable."""
    errors: dict[str, dict[str, list[float]]] = {source: {what: [] for what in ASKED} for source in snapshots}
    inside: dict[str, list[bool]] = {source: [] for source in snapshots}
    for loop in LOOPS:
        mean = Seen(*map(statistics.fmean, zip(*clients.loop(*loop, seconds), strict=True)))
        sizes = f"{loop[0]} x {mean.prompt:.0f}/{mean.output:.0f}"
        print_line(f"{sizes}: ITL {mean.itl / 1e3:.1f} ms, TTFT {mean.ttft / 1e3:.0f} ms, E2E {mean.e2e / 1e3:.0f} ms")
        for source, snapshot in snapshots.items():
            config = snapshot.config().assuming(max_num_seqs=32, max_num_batched_tokens=512)
            said = config.request(prompt_tokens=mean.prompt, output_tokens=mean.output, concurrency=loop[0])
            words = []
            for what in ASKED:
                estimate, true = getattr(said, what), getattr(mean, what)
                is_inside = estimate.low <= true <= estimate.high
                errors[source][what].append(abs(estimate.us / true - 1.0) * 100.0)
                inside[source] += [is_inside] * said.usable
                words.append(f"{what} {estimate.us / true - 1.0:+.0%}{'' if is_inside else ' outside'}")
            print_line(
                f"  {source:6} {', '.join(words)}; {'usable' if said.usable else f'not usable: {said.extrapolated}'}"
            )
    return {
        source: [
            *(figure for what in ASKED for figure in (statistics.fmean(each[what]), max(each[what]))),
            100.0 * statistics.fmean(inside[source]) if inside[source] else -1.0,
            100.0 * len(inside[source]) / len(ASKED) / len(LOOPS),
        ]
        for source, each in errors.items()
    }


def run(minutes: float, loop_s: float, work: Path) -> dict[str, list[float]]:
    """Serve, learn, ask, measure."""
    binaries = prepare(ENVIRONMENT, print_line)
    making = [str(binaries / "python"), str(ENVIRONMENT.parent / "demo" / "model.py"), str(work / "model")]
    with process(making, dict(os.environ), work / "model.log", work) as child:
        child.wait(120)
    passes, traces = free_port(20380), free_port()
    told = {"OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true", "OTEL_SERVICE_NAME": "vllm"}
    spans = ("--otlp-traces-endpoint", f"http://127.0.0.1:{traces}")
    (work / "rule.json").write_text(json.dumps({"rules": [{"facts": {"trace_sampling": 1}}]}))
    of_spans = {"TRACEFIT_LISTEN": f"127.0.0.1:{traces}", "TRACEFIT_CONFIG": str(work / "rule.json")}
    with contextlib.ExitStack() as stack:
        ports = {"spans": stack.enter_context(sidecar(work / "spans", of_spans))}
        server = stack.enter_context(vllm(binaries, work / "model", f"tcp://127.0.0.1:{passes}", work, *spans, **told))
        of_passes = {"TRACEFIT_FPM": f"tcp://127.0.0.1:{passes}", "TRACEFIT_LISTEN": f"127.0.0.1:{free_port()}"}
        ports["plugin"] = stack.enter_context(sidecar(work / "plugin", of_passes))
        ports["pages"] = stack.enter_context(scraping(server.port, work))
        clients = Clients(server.port)
        print_line(f"vLLM serves; {minutes:g} minutes of traffic")
        learn(clients, minutes)
        snapshots = {source: tracefit.load(get(port, "/snapshot") or b"") for source, port in sorted(ports.items())}
        return examine({s: snapshots[s] for s in ("plugin", "spans", "pages")}, clients, loop_s)


def main() -> int:
    """Run it; 0 if all was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of traffic to learn from")
    parser.add_argument("--loop-s", type=float, default=45.0, help="length of each loop")
    parser.add_argument("--record", action="store_true", help="write docs/figures.json, which docs/accuracy.md has")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tracefit-loops-") as work:
        figures = run(options.minutes, options.loop_s, Path(work))
    for source, (*errors, inside, usable) in figures.items():
        shown = ", ".join(
            f"{what.upper()} {mean:.0f} (worst {worst:.0f}) %"
            for what, mean, worst in zip(ASKED, errors[::2], errors[1::2], strict=True)
        )
        print_line(f"{source:6} {shown}; {inside:.0f} % inside the band, {usable:.0f} % usable")
    if options.record:
        record("vllm", figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
