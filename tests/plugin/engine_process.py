"""A stand-in for vLLM's processes: loads the general plugins as vLLM does, then runs engines.

    python engine_process.py spawn|fork|dp|serve|api

``serve``: two data-parallel ranks with as many steps as coefficients take.

The scheduler's module comes from a fake ``vllm`` package on the path; the plugin, from its unpacked distribution.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from importlib.metadata import entry_points


def load_general_plugins():
    for entry_point in entry_points(group="vllm.general_plugins"):
        entry_point.load()()


def engine(rank, ranks, load, requests, steps=9):
    if load:
        load_general_plugins()
    from fakes import Request, drive, vllm_config
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler(config=vllm_config(rank=rank, ranks=ranks))
    for number in range(requests):
        scheduler.add_request(Request(f"rank{rank}-{number}", 20, 3))
    drive(scheduler, steps)
    wait_until_sent()  # grpc is imported and connected: what follows is a matter of milliseconds
    drive(scheduler, 1)


def wait_until_sent():
    (exporter,) = (thing for thing in gc.get_objects() if type(thing).__name__ == "Exporter")
    deadline = time.monotonic() + 300
    while exporter._queue and time.monotonic() < deadline:
        time.sleep(0.01)


def fork_midway():
    """An engine with a running exporter forks; the child goes on scheduling, stops and collects its garbage."""
    from fakes import Request, drive, vllm_config
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = Scheduler(config=vllm_config())
    scheduler.add_request(Request("parent", 20, 3))
    drive(scheduler, 10)
    wait_until_sent()
    drive(scheduler, 1)  # queued, not sent yet
    child = os.fork()
    scheduler.add_request(Request("child" if child == 0 else "parent-after", 20, 3))
    drive(scheduler, 10)
    scheduler.shutdown()
    if child == 0:
        del scheduler
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0


def main(mode, requests):
    if mode == "api":
        load_general_plugins()
        assert "grpc" not in sys.modules
        assert "vllm.v1.core.sched.scheduler" not in sys.modules
        return
    if mode == "midway":
        load_general_plugins()
        fork_midway()
        return
    if mode == "spawn":
        jobs = [("spawn", (0, 1, True, requests))]
    elif mode == "fork":
        load_general_plugins()  # the parent's; vLLM's flag keeps the child from loading again
        jobs = [("fork", (0, 1, False, requests))]
    else:
        more = (200, 1200) if mode == "serve" else (requests,)
        jobs = [("spawn", (rank, 2, True, *more)) for rank in (0, 1)]
    processes = [multiprocessing.get_context(method).Process(target=engine, args=args) for method, args in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main(sys.argv[1], 5)
