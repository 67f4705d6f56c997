"""Every number of the fleet, beside its target: ``make bench WHAT=fleet``.

    ARGS="pull --states 1000"    a thousand states of three configurations: CPU and memory, and what each step costs
    ARGS=overlap                 three replicas side by side against one learner that was fed everything
    ARGS="split --engines 8 --megabytes 400"    recordings of many engines, cut by time, on one worker and on two
    ARGS=outliers                one slow replica among forty; a hundred fleets of equals

States and streams are simulated (tests/support/fleets.py); CPU is that of a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, chdir
from pathlib import Path
from typing import NamedTuple

import numpy as np

from collector.config import Config
from collector.fleet.bulk.bulk_files import find_bulk_files
from collector.fleet.bulk.learn import learn_engines
from collector.fleet.bulk.local_runner import _opened, split_into
from collector.fleet.bulk.split import SHARED, parts_of
from online import Bank, RowBlock, Target, merge_states
from online.rls import compared, replica_of
from tests.support.fleets import CONFIG, state_of
from tests.support.linear_steps import BETA, steps
from tests.support.otlp_bytes import varint
from tests.support.otlp_load import Stream

REPLICAS, SLOWER, ROWS, NOISE = 40, 1.08, 2000, 0.03
FILES = 8
failures: list[str] = []


def line(name, value, target="", good=None):
    verdict = "" if good is None else ("holds" if good else "MISSED")
    if good is False:
        failures.append(name)
    print(f"{name:<62} {value:>20}   {target:<10} {verdict}", flush=True)


def bench_pull(given):
    with tempfile.TemporaryDirectory() as scratch:
        states, out = Path(scratch, "states"), Path(scratch, "fleet")
        states.mkdir()
        for number in range(given.states):
            facts = {"model": "llama", "gpu": "H100", "tensor_parallel_size": 1 << number % 3}
            state = state_of(
                f"engine-{number:05}",
                number,
                rows=1200,
                config_id=f"{number % 3:012x}",
                facts=facts,
                begin_ns=1_700_000_000_000_000_000,
                config=Config(),
            )
            (states / f"{number:05}.bin").write_bytes(state)
        size_mb = sum(path.stat().st_size for path in states.iterdir()) / 1e6
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "collector", "fleet", "pull", str(states), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        sys.stdout.write(done.stdout + done.stderr)
        scale = given.states / 1000
        line(
            f"pull {given.states} states ({size_mb:.0f} MB): CPU",
            f"{cpu_s:.1f} s",
            f"{60 * scale:.0f} s",
            cpu_s <= 60 * scale,
        )
        line("  each", f"{cpu_s / given.states * 1e3:.1f} ms, {size_mb / given.states * 1e3:.0f} kB")
        rss_mb = after.ru_maxrss / 1e3
        line("  largest resident memory", f"{rss_mb:.0f} MB", "500 MB", rss_mb <= 500 and done.returncode == 0)


def coefficients(bank):
    (config_id,) = bank.configs()
    return np.array([f.coefficient for f in bank.targets(config_id)["step_time"].models["portable"].features])


def bench_overlap(given):
    streams = [steps(given.rows, seed, noise=NOISE).rows for seed in (1, 2, 3)]
    one = Bank(CONFIG)
    joined = RowBlock.concatenate(streams)
    one.learn("0f3c52aa9b1e", Target.STEP_TIME, joined.take(np.argsort(joined.end_ns, kind="stable")))
    merged = Bank(CONFIG)
    begin = 1_700_000_000_000_000_000
    parts = [state_of(f"engine-{s}", s, rows=given.rows, begin_ns=begin, noise=NOISE) for s in (1, 2, 3)]
    merged.restore(merge_states(parts, CONFIG))
    apart = float(np.abs(coefficients(merged) / coefficients(one) - 1.0).max())
    name = f"three replicas side by side, {given.rows:,} rows each: worst coefficient"
    line(name, f"{100 * apart:.2f} %", "2 %", apart <= 0.02)


def replica(seed, gain=1.0, **kind):
    bank = Bank(CONFIG)
    rows = steps(ROWS, seed, noise=NOISE, beta=gain * BETA, **kind).rows
    bank.learn("c", Target.STEP_TIME, rows)
    state = bank._configs["c"][Target.STEP_TIME]
    state.flush()
    return replica_of(state.models["portable"], f"engine-{seed}")


def bench_outliers(given):
    for name, kind in (("white noise", {}), ("noise that lasts (AR 0.9)", {"autocorrelation": 0.9})):
        accused = named = wrongly = 0
        fleets = given.fleets if not kind else given.fleets // 5
        for fleet in range(fleets):
            equals = [replica(1_000_000 + 100 * fleet + n, **kind) for n in range(REPLICAS)]
            found, _ = compared(equals, 1)
            accused += any(each.differs for each in found)
            if fleet < fleets // 5:
                slow = replica(2_000_000 + fleet, SLOWER, **kind)
                found, _ = compared([*equals[1:], slow], 1)
                named += next(each.differs for each in found if each.engine == slow.engine)
                wrongly += any(each.differs for each in found if each.engine != slow.engine)
        tries = fleets // 5
        line(
            f"{name}: one of {REPLICAS} 8 % slower, named at {ROWS} rows", f"{named} of {tries}", "all", named == tries
        )
        line("  another one named beside it", f"{wrongly} of {tries}", "0", wrongly == 0)
        line(f"  fleets of {REPLICAS} equals in which one is named", f"{accused} of {fleets}", "0", accused == 0)


def write_recordings(scratch, engines, megabytes):
    """Files cut by time, as a Collector in front of all engines rotates them; and each engine's by themselves."""
    streams = [Stream(number + 1, instance=f"load-{number}", requests=True) for number in range(engines)]
    size = sum(len(streams[0].export(number).payload) for number in range(20)) / 20
    exports = max(FILES, int(megabytes * 1e6 / engines / size))
    steps = 0
    homes = [Path(scratch, name, "recordings") for name in ("all", *map(str, range(engines)))]
    for home in homes:
        home.mkdir(parents=True)
    with ExitStack() as stack:
        own = [stack.enter_context((home / "traces.pb").open("wb")) for home in homes[1:]]
        for part in range(FILES):
            with (homes[0] / f"traces-2026-11-22T{part:02}-00-00.000.pb").open("wb") as file:
                for number in range(part * exports // FILES, (part + 1) * exports // FILES):
                    for stream, alone in zip(streams, own, strict=True):
                        export = stream.export(number)
                        entry = varint(len(export.payload)) + export.payload
                        steps += export.steps
                        file.write(entry)
                        alone.write(entry)
    return steps


class Run(NamedTuple):
    """CPU of the process that was started and of those that it starts, wall clock, the largest of all, its states."""

    own_s: float
    workers_s: float
    wall_s: float
    largest_mb: float
    states: dict[str, bytes]

    @property
    def cpu_s(self):
        return self.own_s + self.workers_s


def replayed(home, *command):
    """A replay of the recordings there; OUT in its command is a directory of its own."""
    with tempfile.TemporaryDirectory() as out:
        words = [word.replace("OUT", out) for word in command]
        # named by where they are relative to whoever reads them, an engine's recordings are called as those of all
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.replay_once", *words],
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
            capture_output=True,
            text=True,
            check=True,
        )
        states = {path.name: path.read_bytes() for path in Path(out).rglob("*.bin")}
    return Run(*map(float, done.stdout.splitlines()[-1].split()), states)


REPLAYS = {
    "one stream for one learner": ["replay", "recordings", "--snapshot", "OUT/s.json", "--state", "OUT/s.bin"],
    "replay --workers 1": ["replay", "recordings", "--snapshot", "OUT/s.json", "--state", "OUT/s.bin", "--workers=1"],
    "fleet replay --workers 1": ["fleet", "replay", "recordings", "-o", "OUT", "--workers=1"],
    "fleet replay --workers 2": ["fleet", "replay", "recordings", "-o", "OUT", "--workers=2"],
    "the same, one worker killed": ["--kill-one", "fleet", "replay", "recordings", "-o", "OUT", "--workers=2"],
}
STREAM, ALONE, ONE, TWO, KILLED = REPLAYS


def bench_split(given):
    with tempfile.TemporaryDirectory() as scratch:
        # In a process of its own: what is started begins with the largest memory of whoever starts it.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            steps = apart.submit(write_recordings, scratch, given.engines, given.megabytes).result()
        home = Path(scratch, "all")
        size_mb = sum(path.stat().st_size for path in home.rglob("*.pb")) / 1e6
        line(f"{given.engines} engines, {size_mb:,.0f} MB in {FILES} files: steps", f"{steps:,}")
        rounds = [{name: replayed(home, *command) for name, command in REPLAYS.items()} for _ in range(given.rounds)]
        runs = {name: min((each[name] for each in rounds), key=lambda run: run.cpu_s) for name in REPLAYS}
        for name, run in runs.items():
            largest_mb = max(each[name].largest_mb for each in rounds)
            told = f"{run.cpu_s:.1f} s CPU {run.wall_s:.1f} s {largest_mb:.0f} MB"
            line(name, told, *(("600 MB", largest_mb <= 600) if name != STREAM else ()))
            line("  CPU per step; of it in the process that was started", told_us(run, steps))
        fleets = [each[name].states for each in rounds for name in (ONE, TWO, KILLED)]
        same = all(states == fleets[0] for states in fleets)
        line("the same bytes from 1 and 2 workers, and after a kill", str(same), "True", same)
        ratio = runs[TWO].cpu_s / runs[ALONE].cpu_s
        line("CPU per step, two workers to one process engine by engine", f"{ratio:.2f}", "1.3", ratio <= 1.3)
        line("  to one process that is one learner of all of it", f"{runs[TWO].cpu_s / runs[STREAM].cpu_s:.2f}")
        faster = max(each[ONE].wall_s / each[TWO].wall_s for each in rounds)
        line("faster by wall clock on two than on one (needs idle cores)", f"{faster:.2f}", "1.8", faster >= 1.8)
        line("  by CPU alone it could be (Amdahl)", f"{possible(runs):.2f}")
        if given.each:
            compare_engines(given, scratch, runs[ALONE].states["s.bin"])


def told_us(run, steps):
    return f"{run.cpu_s / steps * 1e6:.1f} us, {run.own_s / steps * 1e6:.1f} us"


def possible(runs):
    """One worker's CPU to what two take where one waits for nobody: the command's own, and half of its workers'."""
    return runs[ONE].cpu_s / (runs[TWO].own_s + runs[TWO].workers_s / 2)


def compare_engines(given, scratch, merged):
    """Each engine's state, as bulk learns it, to that of a replay of its telemetry alone; then all of them merged."""
    alone = [replayed(Path(scratch, str(number)), *REPLAYS[STREAM]).states["s.bin"] for number in range(given.engines)]
    work = Path(scratch, "work")
    work.mkdir()
    with chdir(Path(scratch, "all")):
        shards = [s for part in parts_of(find_bulk_files(["recordings"])) for s in split_into(part, work).shards]
    own, shared = ([_opened(s) for s in shards if (s.bucket == SHARED) is wanted] for wanted in (False, True))
    learned = {key.instance: pipeline.state() for key, pipeline in learn_engines(Config(), own, shared)}
    equal = sum(learned[f"load-{number}"] == state for number, state in enumerate(alone))
    line("engines learned bit by bit as alone", f"{equal} of {given.engines}", "all", equal == given.engines)
    banks = Bank(Config()), Bank(Config())
    banks[0].restore(merged)
    banks[1].restore(functools.reduce(lambda sum_, state: merge_states([sum_, state], Config()), alone))
    apart = max(np.abs(coefficients(banks[1]) / coefficients(banks[0]) - 1.0))
    line("merged, to adding the states of each alone one by one", f"{apart:.1e}", "1e-9", apart <= 1e-9)


SECTIONS = {"pull": bench_pull, "overlap": bench_overlap, "outliers": bench_outliers, "split": bench_split}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all of them without")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=1, help="of replays; the least CPU counts")
    parser.add_argument("--each", action="store_true", help="compare each engine to a replay of it alone")
    parser.add_argument("--fleets", type=int, default=100)
    given = parser.parse_args()
    for section in given.sections or SECTIONS:
        SECTIONS[section](given)
    print(f"missed: {', '.join(failures)}" if failures else "every number holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
