"""A replay on Ray one of whose workers is killed while it splits and one while it learns, beside one in this process.

python -m tests.support.killed_on_ray RECORDINGS SCRATCH     prints whether each was killed, and "same bytes"
"""

import os
import signal
import sys
from pathlib import Path

from collector.fleet.bulk import LocalRunner, RayRunner, find_bulk_files, replay_in_bulk
from collector.fleet.bulk.runners import learn_for_ray, split_for_ray
from collector.runtime import SystemClock
from tests.support.fleets import CONFIG


def die_once(mark):
    try:
        Path(mark).mkdir()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def states_of(files, runner, work):
    work.mkdir()
    try:
        replayed = replay_in_bulk(files, CONFIG, runner, work, SystemClock(), print)
    finally:
        runner.close()
    return [path.read_bytes() for path in replayed.states]


def main(recordings, scratch):
    marks = [f"{scratch}/killed-splitting", f"{scratch}/killed-learning"]

    def split(part):
        for shard in split_for_ray(part):
            yield shard
            die_once(marks[0])

    def learn(task):
        die_once(marks[1])
        return learn_for_ray(task)

    files = find_bulk_files([recordings])
    runner = RayRunner("local")
    runner._split = runner._ray.remote(num_returns="streaming", max_retries=3)(split)
    runner._learn = runner._ray.remote(max_retries=3)(learn)
    on_ray = states_of(files, runner, Path(scratch, "ray"))
    here = states_of(files, LocalRunner(Path(scratch, "here"), 1), Path(scratch, "here"))
    print(*(Path(mark).exists() for mark in marks), "same bytes" if on_ray == here != [] else "other bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
