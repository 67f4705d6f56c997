"""A replay in a process of its own: prints its CPU s, that of its workers, wall clock s, the largest of them in MB.

python -m tests.bench.replay_once [--kill-one] replay ARGUMENTS    --kill-one: its first worker that learns is killed
"""

import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

from collector.cli import main
from collector.fleet.bulk import local_runner


def learn_or_die(task, work):
    try:
        (Path(work) / "killed").mkdir()
    except FileExistsError:
        return local_runner.learn_into(task, work)
    return os.kill(os.getpid(), signal.SIGKILL)


def learn_buckets(self, tasks):
    yield from self._run(partial(learn_or_die, work=self._work), tasks)


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--kill-one"]
    if len(arguments) < len(sys.argv) - 1:
        local_runner.LocalRunner.learn_buckets = learn_buckets
    begun = time.monotonic()
    code = main(arguments)
    wall_s = time.monotonic() - begun
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(*(u.ru_utime + u.ru_stime for u in used), wall_s, max(u.ru_maxrss for u in used) / 1e3)
    sys.exit(code)
