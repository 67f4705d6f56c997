"""One fault after the other, against the real process: what was acknowledged and lost, how long, and what was said.

    python -m tests.torture.cases [NAME …]     default: all; prints a row of the table in docs/reliability.md for each

A full disk is a tmpfs, which takes root; without it ``disk-full`` uses a limit on the size of files (RLIMIT_FSIZE).
What is lost is counted in exports: each holds one span of ``STEPS`` steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from collector.app import Sidecar
from collector.runtime.clock import SystemClock
from collector.runtime.exits import StartError
from tests.support.sidecars import make_config
from tests.torture.harness import READY_S, TOLERANCE, Load, Victim, compared, said, uninterrupted

STEPS = 10
JOURNAL = {"STATE__INTERVAL_S": "3600"}


class Row(NamedTuple):
    """A fault and what became of it; exports, seconds."""

    fault: str
    acknowledged: int
    lost: int
    recovery_s: float
    said: str


def _learned_rows(directory):
    """Rows of step time that the default model has, over all engines."""
    document = json.loads((directory / "snapshot.json").read_bytes())
    return sum(config["targets"]["step_time"]["models"]["portable"]["rows"] for config in document["configs"])


def _lost_exports(directory, load_):
    """Exports whose steps are in no row: a lost one costs its rows and perhaps the interval behind it."""
    expected = sum(
        rows
        for (_, target, model, what), rows in uninterrupted(load_, directory).items()
        if (target, model, what) == ("step_time", "portable", "rows")
    )
    return -(-max(0, expected - _learned_rows(directory)) // (STEPS + 1))


def _line(directory, *words):
    """The last line that holds all these words."""
    lines = [line for line in said(directory).splitlines() if all(word in line for word in words)]
    assert lines, f"nobody said {words}: {said(directory)[-2000:]}"
    return lines[-1].partition(":")[2].partition(":")[2]


def _sent(victim, load_):
    """All of the load, acknowledged."""
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.done, 300)
    return load_


def _wait(condition, seconds):
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s, "it takes too long"
        time.sleep(0.02)


def damaged(directory, fault, damage, exports=60):
    """A kill, then damage to the journal's segments; what is learned from of the rest."""
    victim = Victim(directory, **JOURNAL)
    load_ = _sent(victim, Load(2, exports, STEPS))
    victim.end(signal.SIGKILL)
    damage(sorted(path for path in directory.iterdir() if path.name.startswith("journal.0")))
    victim = Victim(directory, **JOURNAL)
    ready_s = victim.ready_s
    assert victim.metric("tracefit_journal_damaged_bytes") > 0
    ready = json.loads(victim.get("/readyz"))
    assert "journal" in ready["lost"], ready
    _wait(lambda: victim.metric("tracefit_journal_replayed_spans_total") >= load_.acknowledged - 1, 60)
    lost = load_.acknowledged - int(victim.metric("tracefit_journal_replayed_spans_total"))
    victim.end(signal.SIGTERM)
    return Row(fault, load_.acknowledged, lost, ready_s, _line(directory, "lost:"))


def bit_flip(directory, seed):
    """One bit of the journal flipped anywhere."""
    rng = random.Random(seed)

    def flip(segments):
        path = rng.choice(segments)
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

    return damaged(directory, "one bit of the journal flipped, after a kill", flip)


def bad_tail(directory):
    """The journal's end cut off in the middle of an entry; then bytes behind the end that are none of its."""

    def cut(segments):
        data = segments[-1].read_bytes()
        segments[-1].write_bytes(data[:-1000])

    def add(segments):
        with segments[-1].open("ab") as file:
            file.write(random.Random(1).randbytes(5000))

    rows = [damaged(directory / "cut", "", cut), damaged(directory / "garbage", "", add)]
    assert [row.lost for row in rows] == [1, 0], rows
    fault = "the journal's end cut by 1,000 bytes, after a kill; 5,000 bytes of garbage behind it (none lost)"
    return rows[0]._replace(fault=fault, recovery_s=max(row.recovery_s for row in rows))


def bit_flips(directory):
    """Ten of them, each anywhere."""
    rows = [bit_flip(directory / str(seed), seed) for seed in range(10)]
    assert all(row.lost <= 1 for row in rows), rows
    worst = max(rows, key=lambda row: row.lost)
    return worst._replace(
        fault="one bit of the journal flipped anywhere, after a kill; 10 times, the worst",
        recovery_s=max(row.recovery_s for row in rows),
    )


@contextlib.contextmanager
def small_disk(directory, size_mib):
    """A disk that is soon full; whether it is one (else a limit on each file's size)."""
    directory.mkdir(parents=True)
    mounted = os.getuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(directory)], stderr=subprocess.DEVNULL
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_mib << 17, before[1]))
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.check_call(["umount", "-l", str(directory)])
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_full(directory, kills=10, exports=120):
    """A loop of kills while the disk is full, with room now and then."""
    disk = directory / "disk"
    with small_disk(disk, 24) as mounted:
        place, ballast = disk / "life", disk / "ballast"
        victim = Victim(place, STATE__INTERVAL_S="0.3")
        load_ = Load(2, exports, STEPS)
        load_.port = victim.grpc_port
        load_.start()
        refused = recovery_s = 0.0
        for number in range(kills):
            if mounted:
                _fill(ballast)
            time.sleep(0.4)
            refused += sum(
                victim.metric(f'tracefit_receiver_refused_spans_total{{reason="{reason}",transport="grpc"}}')
                for reason in ("journal_failed", "journal_full")
            )
            victim.end(signal.SIGKILL)
            victim = Victim(place, seed=number, STATE__INTERVAL_S="0.3")
            load_.port = victim.grpc_port
            ballast.unlink(missing_ok=True)
            recovery_s = max(recovery_s, _until_accepted(load_))
        _wait(lambda: load_.done, 300)
        assert victim.end(signal.SIGTERM) == 0, said(place)[-2000:]
        rows, expected_rows, worst = compared(place, load_)
        assert (rows, worst <= TOLERANCE) == (expected_rows, True)
        lost, line = _lost_exports(place, load_), _line(place, "exports are refused")
    assert refused > 0, "the disk was never full"
    name = "disk full" if mounted else "files may not grow"
    return Row(
        f"{name}, journal, {kills} kills ({refused:.0f} exports refused)", load_.acknowledged, lost, recovery_s, line
    )


def _fill(ballast):
    with contextlib.suppress(OSError), ballast.open("ab") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def _until_accepted(load_):
    begun_s, before = time.monotonic(), load_.acknowledged
    _wait(lambda: load_.acknowledged > before or load_.done, READY_S)
    return time.monotonic() - begun_s


def _race(directory, barrier, results):
    for number in range(100):
        sidecar = Sidecar(make_config(directory, LOG_LEVEL="error"), SystemClock())
        barrier.wait()
        try:
            sidecar.start()
            outcome = "started"
        except StartError as error:
            outcome = str(error)
        results.put((number, os.getpid(), outcome))
        barrier.wait()
        sidecar.stop()


def race(directory):
    """Two sidecars start at once on one directory, a hundred times."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_race, args=(directory, barrier, results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    outcomes = {}
    for _ in range(200):
        number, pid, outcome = results.get(timeout=120)
        outcomes.setdefault(number, {})[pid] = outcome
    for racer in racers:
        racer.join(60)
    for both in outcomes.values():
        winners = [pid for pid, outcome in both.items() if outcome == "started"]
        assert len(winners) == 1, both
        (loser,) = [outcome for outcome in both.values() if outcome != "started"]
        assert "another process uses snapshot.directory" in loser
        assert f"process {winners[0]} on" in loser or "has not said yet" in loser, both
    said_by_loser = "another process uses snapshot.directory …: process … on …, since …"
    return Row("two sidecars start on one directory, 100 times", 0, 0, 0.0, said_by_loser)


def killed_without_a_journal(directory, exports=120):
    """``durability: memory``: what came since the last state is lost, and said to be."""
    victim = Victim(directory, DURABILITY="memory", STATE__INTERVAL_S="0.3")
    load_ = Load(2, exports, STEPS)
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.acknowledged > exports and (directory / "state.bin").exists(), 60)
    victim.end(signal.SIGKILL)
    load_.port = 0
    victim = Victim(directory, DURABILITY="memory", STATE__INTERVAL_S="0.3")
    ready_s, load_.port = victim.ready_s, victim.grpc_port
    assert "acknowledged after its last state" in json.loads(victim.get("/readyz"))["lost"]
    _wait(lambda: load_.done, 120)
    assert victim.end(signal.SIGTERM) == 0
    return Row(
        "kill without a journal, state every 0.3 s (60 s by default)",
        load_.acknowledged, _lost_exports(directory, load_), ready_s, _line(directory, "Lost:"),
    )  # fmt: skip


def directory_deleted(directory, durability, exports=150):
    """The directory goes away, and comes back."""
    victim = Victim(directory, DURABILITY=durability, STATE__INTERVAL_S="0.3")
    load_ = Load(2, exports, STEPS)
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.acknowledged > exports // 2, 60)
    shutil.rmtree(directory)
    time.sleep(1)
    directory.mkdir()
    recovery_s = _until_accepted(load_)
    _wait(lambda: load_.done, 120)
    assert victim.end(signal.SIGTERM) == 0, said(directory)[-2000:]
    lost = _lost_exports(directory, load_)
    return Row(
        f"snapshot.directory deleted and made again, {durability}",
        load_.acknowledged,
        lost,
        recovery_s,
        _line(directory, "not written"),
    )


def stopped_under_load(directory, durability):
    """SIGTERM while producers send as fast as they can; then a start that finds the rest."""
    victim = Victim(directory, DURABILITY=durability, STATE__INTERVAL_S="3600")
    load_ = Load(4, 250, STEPS)
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.acknowledged > 400, 60)
    begun_s = time.monotonic()
    assert victim.end(signal.SIGTERM) == 0, said(directory)[-2000:]
    stop_s = time.monotonic() - begun_s
    victim = Victim(directory, DURABILITY=durability)
    load_.port = victim.grpc_port
    _wait(lambda: load_.done, 300)
    assert victim.end(signal.SIGTERM) == 0
    assert "not learned from" not in said(directory)
    lost = _lost_exports(directory, load_)
    return Row(f"SIGTERM under flat-out producers, {durability}", load_.acknowledged, lost, stop_s, "nothing: exit 0")


@contextlib.contextmanager
def read_only(directory):
    """The directory takes no files: under a read-only view of itself, or (without root) by its mode."""
    mode = directory.stat().st_mode
    if os.getuid() == 0:
        subprocess.check_call(["mount", "--bind", str(directory), str(directory)])
        subprocess.check_call(["mount", "-o", "remount,bind,ro", str(directory)])
    else:
        directory.chmod(0o500)
    try:
        yield
    finally:
        if os.getuid() == 0:
            subprocess.check_call(["umount", "-l", str(directory)])
        else:
            directory.chmod(mode)


def directory_read_only(directory, exports=150):
    """``durability: memory``: the directory is read-only for a while; then again, until the process has ended."""
    settings = {"DURABILITY": "memory", "STATE__INTERVAL_S": "0.3"}
    victim = Victim(directory, **settings)
    load_ = Load(2, exports, STEPS)
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.acknowledged > exports // 2, 60)
    with read_only(directory):
        before = load_.acknowledged
        _wait(lambda: "unsaved" in json.loads(victim.get("/readyz")), 60)
        _wait(lambda: load_.acknowledged > before, 60)
    recovery_s = _until_accepted(load_)
    _wait(lambda: load_.done, 120)
    assert victim.end(signal.SIGTERM) == 0, said(directory)[-2000:]
    lost = _lost_exports(directory, load_)
    victim = Victim(directory, **settings)
    with read_only(directory):
        _sent(victim, Load(3, 10, STEPS))
        assert victim.end(signal.SIGTERM) == 1
    line = _line(directory, "stopped without a last state")
    assert line.endswith("s is lost"), line
    return Row("snapshot.directory read-only for a while, memory", load_.acknowledged, lost, recovery_s, line)


@contextlib.contextmanager
def burners(number, core):
    """Processes that leave little of one core to whoever is pinned to it."""
    burn = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def stopped_on_a_starved_cpu(directory, engines=30, exports=100, steps=40):
    """SIGTERM with a large state and a full queue on an eighth of a core: what is in no state is counted."""
    settings = {
        "DURABILITY": "memory",
        "STATE__INTERVAL_S": "3600",
        "JOIN__GRACE_S": "3600",  # everything is held: the state is large
        "JOIN__WINDOW_S": "3600",
        "QUEUE__CAPACITY_BYTES": str(1 << 30),
    }
    victim = Victim(directory, SHUTDOWN__DRAIN_S="1", **settings)
    load_ = Load(engines, exports, steps)
    load_.port = victim.grpc_port
    load_.start()
    _wait(lambda: load_.acknowledged > engines * exports // 3, 300)
    core = min(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{victim.process.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
    with burners(7, core):
        _wait(lambda: load_.acknowledged > engines * exports // 2, 300)
        begun_s = time.monotonic()
        code = victim.end(signal.SIGTERM)
        stop_s = time.monotonic() - begun_s
    load_.stop.set()
    for thread in load_.threads:
        thread.join()
    line = _line(directory, "stopped before all was done") if code else "nothing: exit 0"
    counted = sum(int(number) for number in re.findall(r"(\d+) spans", line))
    victim = Victim(directory, SHUTDOWN__DRAIN_S="50", **settings)
    assert victim.end(signal.SIGTERM) == 0, said(directory)[-3000:]
    missing = load_.acknowledged - (_learned_rows(directory) + engines) // steps
    sent_twice = counted - missing  # accepted, and the sender did not hear of it any more
    assert 0 <= sent_twice <= engines, (load_.acknowledged, missing, line)
    name = "SIGTERM with a large state and a full queue on an eighth of a core, memory"
    return Row(name, load_.acknowledged, missing, stop_s, line)


CASES = {
    "bit-flips": bit_flips,
    "bad-tail": bad_tail,
    "disk-full": disk_full,
    "race": race,
    "killed-memory": killed_without_a_journal,
    "directory-deleted": lambda directory: directory_deleted(directory, "journal"),
    "directory-deleted-memory": lambda directory: directory_deleted(directory, "memory"),
    "stop-memory": lambda directory: stopped_under_load(directory, "memory"),
    "read-only": directory_read_only,
    "stop-starved": stopped_on_a_starved_cpu,
    "stop-journal": lambda directory: stopped_under_load(directory, "journal"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], help="default: all")
    for name in parser.parse_args().names or CASES:
        with tempfile.TemporaryDirectory() as directory:
            row = CASES[name](Path(directory) / name)
        text = f"| {row.fault} | {row.acknowledged} | {row.lost} | {row.recovery_s:.1f} s | {row.said} | `{name}` |"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
