"""A stand-in for vLLM's processes: loads the general plugins as vLLM does, then runs engines.

    python engine_process.py spawn|fork|dp|api

``fork`` uses the hook, the others name the scheduler's class. An engine waits after its first steps for
the file ``go``, if the environment names one: a publisher's listener must be there before what it is to hear.

vLLM is a fake package on the path; the plugin, its unpacked distribution.
"""

import gc
import multiprocessing
import os
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path


def load_general_plugins():
    for entry_point in entry_points(group="vllm.general_plugins"):
        entry_point.load()()


def scheduler_class(named):
    from vllm.config import SchedulerConfig

    return SchedulerConfig("tracefit_vllm.TracedScheduler" if named else None).get_scheduler_cls()


def engine(rank, ranks, named, steps):
    load_general_plugins()
    from fakes import Request, drive, vllm_config

    scheduler = scheduler_class(named)(vllm_config=vllm_config(rank=rank, ranks=ranks))
    scheduler.add_request(Request(f"rank{rank}-0", 20, 3))
    drive(scheduler, 5)
    wait_for(lambda: not os.environ.get("GO") or Path(os.environ["GO"]).exists())
    for number in range(1, steps // 6):
        scheduler.add_request(Request(f"rank{rank}-{number}", 20 + number % 40, 3 + number % 7))
        drive(scheduler, 6)
        if steps > 100:
            time.sleep(0.001)  # as fast as an engine, not as fast as this machine
    wait_for(lambda: not queued())  # connected: what follows is a matter of milliseconds
    drive(scheduler, 1)


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def queued():
    (publisher,) = (thing for thing in gc.get_objects() if type(thing).__name__ == "Publisher")
    return len(publisher._queue)


def main(mode):
    if mode == "api":
        load_general_plugins()
        assert not {"grpc", "zmq", "vllm.v1.core.sched.scheduler"} & set(sys.modules)
        return
    ranks, steps = (2, 900) if mode == "dp" else (1, 18)
    method = "fork" if mode == "fork" else "spawn"
    jobs = [(rank, ranks, mode != "fork", steps) for rank in range(ranks)]
    processes = [multiprocessing.get_context(method).Process(target=engine, args=args) for args in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main(sys.argv[1])
