"""Kill the real process under real load, in each stage of start and stop and whenever; compare with one never killed.

    python -m tests.torture.harness [--kills 100] [--seed 1] [--faults none,full,read-only,slow,clock] [--fsync]

A sender thread per engine sends its exports in order and repeats each until it is acknowledged, as an exporter does.
The process is killed, restarted with the next fault, and so on: first once in each stage of tests/torture/stages.py,
then at random moments. The last one is stopped in order.

What must hold: every export acknowledged, in whichever life, is learned once, so that rows and published coefficients
are those of one uninterrupted pipeline over the same exports (relative 1e-9); each restart is ready within ``READY_S``;
nothing is cold; every state file that a kill leaves behind can be read, or the one before it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import grpc

from collector.config.load import load
from collector.ingest.otlp_grpc import METHOD
from collector.ingest.queue import Export
from collector.service.build import make_pipeline
from tests.bench.figures import record
from tests.support.paths import ROOT
from tests.support.step_exports import attribute, make_export, step_attributes
from tests.torture.stages import START, STOP

FAULTS = ("none", "full", "read-only", "slow", "clock")
READY_S = 20.0
"""Generous: the machine may be busy. The figure is printed."""
TOLERANCE = 1e-9
EVERY_STAGE = (*START, *STOP)


class Report(NamedTuple):
    """What a run showed."""

    kills: int
    in_stages: int
    exports: int
    acknowledged: int
    repeats: int
    replayed_spans: int
    rows: int
    expected_rows: int
    worst_difference: float
    ready_s: float


NOT_FOR_VICTIMS = ("TRACEFIT_", "COVERAGE_")
"""Coverage, because one that is killed while it writes leaves a data file that cannot be read."""


def environment(directory, *, fsync=False, **changes):
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(NOT_FOR_VICTIMS)},
        "PYTHONPATH": str(ROOT),
        "TRACEFIT_RECEIVERS__GRPC__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_RECEIVERS__HTTP__ENABLED": "false",
        "TRACEFIT_EXPORTERS__HTTP__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_SNAPSHOT__DIRECTORY": str(directory),
        "TRACEFIT_SNAPSHOT__PUBLISH_INTERVAL_S": "0.2",
        "TRACEFIT_STATE__INTERVAL_S": "0.3",
        "TRACEFIT_DURABILITY": "journal",
        "TRACEFIT_JOURNAL__CAPACITY_MIB": "32",
        "TRACEFIT_JOURNAL__FSYNC": str(fsync).lower(),
        "TRACEFIT_LEARNERS": "[rls]",
        **{f"TRACEFIT_{name}": value for name, value in changes.items()},
    }


class Victim:
    """One life of the process."""

    def __init__(self, directory, fault="none", seed=1, stage=None, **settings):
        self.begun_s = time.monotonic()
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log = (directory.parent / f"{directory.name}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.victim", fault, str(seed), *([stage] if stage else [])],
            cwd=ROOT,
            env=environment(directory, **settings),
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        if stage in START:
            return
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"did not start: {said(directory)[-3000:]}")
        self.grpc_port, self.http_port = map(int, line.split())
        self.ready_s = time.monotonic() - self.begun_s

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=20) as answer:
            return answer.read()

    def metric(self, series):
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(series)

    def end(self, number=0):
        """Its exit code, after a signal if there is one."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self.process.stdout.close()
        self.log.close()
        return code


def said(directory):
    """What all lives in a directory have said."""
    return (directory.parent / f"{directory.name}.log").read_text()


def make_exports(engine, first_step, steps):
    """One span of steps whose time follows from their work, as a server's does, engine by engine another speed."""
    request = make_export(1, steps_per_span=steps, first_step=first_step, instance=f"engine-{engine}")
    for number, event in enumerate(request.resource_spans[0].scope_spans[0].spans[0].events):
        step = first_step + number
        del event.attributes[:]
        event.attributes.extend(attribute(key, value) for key, value in work(engine, step).items())
    return request.SerializeToString()


def work(engine, step):
    """A step of 8 to 39 requests, some with a prefill; it begins where the formula puts it."""
    requests, prefill = 8 + (step * 7 + engine) % 32, (step * 131) % 700 if step % 5 == 0 else 0
    context = requests * (100 + (step * 37) % 900)
    noise_us = ((step * 2654435761) % 1009) / 5
    start_ns = 10**12 + step * 20_000_000 + int((requests * 130 + prefill * 8 + noise_us) * 1e3)
    return step_attributes(
        step,
        **{
            "step.ts_start_ns": start_ns,
            "step.ts_end_ns": start_ns + 90_000,
            "queue.running_depth": requests,
            "batch.num_decode_reqs": requests - (prefill > 0),
            "batch.num_prefill_reqs": int(prefill > 0),
            "batch.prefill_tokens": prefill,
            "batch.decode_tokens": requests - (prefill > 0),
            "batch.scheduled_tokens": prefill + requests - (prefill > 0),
            "batch.context_tokens": context,
            "batch.context_tokens_single": context,
        },
    )


class Load:
    """Sends every export of every engine in order until all are acknowledged."""

    def __init__(self, engines, exports, steps):
        self.streams = [[make_exports(e, 1 + i * steps, steps) for i in range(exports)] for e in range(engines)]
        self.port = 0
        self.acknowledged = 0
        self.repeats = 0
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._send, args=(stream,), daemon=True) for stream in self.streams]

    def start(self):
        for thread in self.threads:
            thread.start()

    @property
    def done(self):
        return not any(thread.is_alive() for thread in self.threads)

    def _send(self, stream):
        for payload in stream:
            while not self._sent(payload):
                with self._lock:
                    self.repeats += 1
                if self.stop.wait(0.02):
                    return
            with self._lock:
                self.acknowledged += 1
            if self.stop.wait(0.001):
                return

    def _sent(self, payload):
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
                channel.unary_unary(METHOD)(payload, timeout=10)
        except grpc.RpcError:
            return False
        return True


def published(document):
    """Coefficients and rows by engine, target, model, feature; the live ones are outside the promise."""
    out = {}
    for config in document["configs"]:
        instance = config["engines"][0]["instance"]
        for target, found in config["targets"].items():
            for model, one in found["models"].items():
                out[instance, target, model, "rows"] = one["rows"]
                for feature in one["features"]:
                    out[instance, target, model, feature["name"]] = feature["coefficient"]
    return out


def uninterrupted(load_, directory):
    """What one pipeline learns from the same exports."""
    pipeline = make_pipeline(load(None, environment(directory)))
    for round_ in zip(*load_.streams, strict=True):
        pipeline.process([Export(payload, "peer", "grpc", 1) for payload in round_])
    pipeline.flush()
    return published(json.loads(pipeline.snapshot(1, 1).to_json()))


def kill_in_stage(directory, stage, load_, *, fsync):
    """A life that ends in this stage, by itself."""
    victim = Victim(directory, stage=stage, fsync=fsync, STATE__INTERVAL_S="3600")
    if stage in STOP:
        load_.port = victim.grpc_port
        deadline_s = time.monotonic() + 60
        while not victim.metric("tracefit_worker_batch_seconds_count"):  # else there is nothing to save
            assert not load_.done, f"the load ended before {stage}: send more --exports"
            assert time.monotonic() < deadline_s, stage
            time.sleep(0.02)
        victim.process.send_signal(signal.SIGTERM)
    assert victim.end() == -signal.SIGKILL, f"{stage} was not reached: {said(directory)[-3000:]}"


def compared(directory, load_):
    """Rows learned, those of one uninterrupted process, and the worst relative difference of anything published."""
    found = published(json.loads((directory / "snapshot.json").read_bytes()))
    expected = uninterrupted(load_, directory)
    assert found.keys() == expected.keys()
    rows = sum(value for key, value in found.items() if key[3] == "rows")
    expected_rows = sum(value for key, value in expected.items() if key[3] == "rows")
    worst = max(abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-12) for key in expected)
    return rows, expected_rows, worst


def run(
    directory, *, kills, seed, faults, exports, engines=2, steps=10, fsync=False, stages=EVERY_STAGE, say=lambda _: None
):
    """Torture; the report, after every assertion held."""
    rng = random.Random(seed)
    load_ = Load(engines, exports, steps)
    victim = Victim(directory, "none", seed, fsync=fsync)
    load_.port = victim.grpc_port
    load_.start()
    worst_ready_s, replayed, done = victim.ready_s, 0, 0
    try:
        while done < kills:
            time.sleep(rng.uniform(0.0, 0.8))
            if done % 10 == 9:
                replayed += int(victim.metric("tracefit_journal_replayed_spans_total"))
            stage = stages[done] if done < len(stages) else None
            victim.end(signal.SIGKILL)
            done += 1
            if stage is not None:
                kill_in_stage(directory, stage, load_, fsync=fsync)
            fault = faults[done % len(faults)]
            victim = Victim(directory, fault, seed + done, fsync=fsync)
            load_.port = victim.grpc_port
            ready = json.loads(victim.get("/readyz"))
            assert ready["state"] != "cold", ready
            worst_ready_s = max(worst_ready_s, victim.ready_s)
            if done % 10 == 0:
                say(f"{done} kills, {load_.acknowledged} acknowledged, {load_.repeats} repeated")
        victim.end(signal.SIGKILL)
        victim = Victim(directory, "none", seed, fsync=fsync)
        load_.port = victim.grpc_port
        deadline_s = time.monotonic() + 600
        while not load_.done:
            assert time.monotonic() < deadline_s, "the load must come through"
            time.sleep(0.05)
        assert victim.end(signal.SIGTERM) == 0, said(directory)[-3000:]
    finally:
        load_.stop.set()
        if victim.process.poll() is None:
            victim.end(signal.SIGKILL)
    rows, expected_rows, worst = compared(directory, load_)
    total = engines * exports
    staged = min(len(stages), kills)
    report = Report(
        *(done + staged, staged, total, load_.acknowledged, load_.repeats, replayed, rows, expected_rows, worst),
        ready_s=worst_ready_s,
    )
    assert rows == expected_rows, report
    assert worst <= TOLERANCE, report
    assert load_.acknowledged == engines * exports, report
    assert worst_ready_s <= READY_S, report
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exports", type=int, default=4000)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--record", action="store_true", help="write the figures to docs/figures.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = run(
            Path(directory) / "life",
            kills=args.kills,
            seed=args.seed,
            faults=args.faults.split(","),
            exports=args.exports,
            fsync=args.fsync,
            say=lambda text: sys.stdout.write(text + "\n") and sys.stdout.flush(),
        )
    for name, value in report._asdict().items():
        sys.stdout.write(f"{name:18} {value}\n")
    if args.record:
        record("torture", report._asdict())


if __name__ == "__main__":
    main()
