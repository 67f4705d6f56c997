"""Every number of the fleet, beside its target: ``make bench WHAT=fleet``.

    ARGS="pull --states 1000"    a thousand states of three configurations: CPU and memory, and what each step costs
    ARGS=overlap                 three replicas side by side against one learner that was fed everything
    ARGS="split --engines 8 --megabytes 400"    recordings of many engines, cut by time: one learner, one worker, two
    ARGS=outliers                one slow replica among forty; a hundred fleets of equals

States and streams are simulated (tests/support/fleets.py); CPU is that of a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from collector.config import Config
from online import Bank, RowBlock, Target, merge_states
from online.rls import compared, replica_of
from tests.support.fleets import CONFIG, state_of
from tests.support.linear_steps import BETA, steps
from tests.support.otlp_bytes import varint
from tests.support.otlp_load import Stream

REPLICAS, SLOWER, ROWS, NOISE = 40, 1.08, 2000, 0.03
OWN_ENGINES = 4
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
        accused = clustered = named = ratios_held = wrongly = 0
        fleets = given.fleets if not kind else given.fleets // 5
        for fleet in range(fleets):
            equals = [replica(1_000_000 + 100 * fleet + n, **kind) for n in range(REPLICAS)]
            found, clusters = compared(equals, 1)
            accused += any(each.differs for each in found)
            clustered += bool(clusters)
            ratios_held += all(each.low <= 1.0 <= each.high for each in found)
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
        line("  fleets of equals that fall into clusters", f"{clustered} of {fleets}", "0", clustered == 0)
        line("  fleets whose intervals hold every ratio at once", f"{ratios_held} of {fleets}", "95 %")


def write_recordings(directory, engines, megabytes, files):
    """Files cut by time, as a Collector in front of all engines rotates them; also the first engines by themselves."""
    directory.mkdir()
    streams = [Stream(number + 1, instance=f"load-{number}", requests=True) for number in range(engines)]
    size = sum(len(streams[0].export(number).payload) for number in range(20)) / 20
    exports = max(files, int(megabytes * 1e6 / engines / size))
    steps = 0
    own = [directory.with_name(f"own-{number}.pb").open("wb") for number in range(min(engines, OWN_ENGINES))]
    for part in range(files):
        with (directory / f"traces-2026-11-22T{part:02}-00-00.000.pb").open("wb") as file:
            for number in range(part * exports // files, (part + 1) * exports // files):
                for place, stream in enumerate(streams):
                    export = stream.export(number)
                    entry = varint(len(export.payload)) + export.payload
                    steps += export.steps
                    file.write(entry)
                    if place < len(own):
                        own[place].write(entry)
    for file in own:
        file.close()
    return steps


def replayed(recordings, state, *options):
    """CPU, wall clock and the largest process of a replay, and its state."""
    command = [sys.executable, "-m", "tests.bench.replay_once", str(recordings), "--snapshot", f"{state}.json"]
    done = subprocess.run([*command, "--state", str(state), *options], capture_output=True, text=True, check=True)
    cpu_s, wall_s, largest_mb = map(float, done.stdout.splitlines()[-1].split())
    return cpu_s, wall_s, largest_mb, state.read_bytes()


def bench_split(given):
    with tempfile.TemporaryDirectory() as scratch:
        recordings = Path(scratch, "recordings")
        # In a process of its own: what is started begins with the largest memory of whoever starts it.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            steps = apart.submit(write_recordings, recordings, given.engines, given.megabytes, 8).result()
        size_mb = sum(path.stat().st_size for path in recordings.iterdir()) / 1e6
        line(f"{given.engines} engines, {size_mb:,.0f} MB in 8 files: steps", f"{steps:,}")
        runs = {}
        for name, options in (
            ("one learner for all", []),
            ("one worker", ["--workers", "1"]),
            ("two workers", ["--workers", "2"]),
            ("two workers, one killed", ["--workers", "2", "--kill-one"]),
        ):
            runs[name] = cpu_s, wall_s, largest_mb, _ = replayed(recordings, Path(scratch, "state"), *options)
            told = f"{cpu_s:.0f} s CPU {wall_s:.0f} s {largest_mb:.0f} MB"
            line(name, told, *(("600 MB", largest_mb <= 600) if options else ()))
            line("  CPU per step", f"{cpu_s / steps * 1e6:.1f} us")
        alone_s = alone_steps = 0
        for number in range(min(given.engines, OWN_ENGINES)):
            alone_s += replayed(Path(scratch, f"own-{number}.pb"), Path(scratch, "own"))[0]
            alone_steps += steps / given.engines
        alone_us = alone_s / alone_steps * 1e6
        line("replay of one engine's telemetry alone, CPU per step", f"{alone_us:.1f} us")
        same = len({run[3] for name, run in runs.items() if name != "one learner for all"})
        line("the same bytes from 1 and 2 workers, and after a kill", str(same == 1), "True", same == 1)
        for name in ("one worker", "two workers"):
            ratio = runs[name][0] / steps * 1e6 / alone_us
            line(f"CPU per step, {name}, to that of one engine alone", f"{ratio:.2f}", "1.3", ratio <= 1.3)
            ratio = runs[name][0] / runs["one learner for all"][0]
            line("  to that of one learner for all engines", f"{ratio:.2f}", "1.3", ratio <= 1.3)
        faster = runs["one worker"][1] / runs["two workers"][1]
        line("faster by wall clock on two than on one (needs idle cores)", f"{faster:.2f}", "1.8", faster >= 1.8)
        possible = 2 * runs["one worker"][0] / runs["two workers"][0]
        line("  by CPU alone it could be", f"{possible:.2f}")


SECTIONS = {"pull": bench_pull, "overlap": bench_overlap, "outliers": bench_outliers, "split": bench_split}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all of them without")
    parser.add_argument("--states", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--fleets", type=int, default=100)
    given = parser.parse_args()
    for section in given.sections or SECTIONS:
        SECTIONS[section](given)
    print(f"missed: {', '.join(failures)}" if failures else "every number holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
