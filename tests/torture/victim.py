"""The process that gets killed: ``tracefit run`` with trouble put in.

python -m tests.torture.victim FAULT SEED [STAGE]

Its configuration comes by TRACEFIT_* variables; a STAGE of tests/torture/stages.py is where it ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from collector.app import Sidecar
from collector.config.load import load
from collector.runtime.filesystem import SystemFiles
from collector.runtime.tasks import Stop, SystemClock, serve
from tests.torture import stages
from tests.torture.faults import FaultyFiles, JumpingClock


def main():
    fault, seed = sys.argv[1], int(sys.argv[2])
    for stage in sys.argv[3:]:
        stages.arm(stage)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    clock = JumpingClock(seed) if fault == "clock" else SystemClock()
    files = FaultyFiles(fault, seed) if fault in ("full", "read-only", "slow") else SystemFiles()
    stop = Stop()
    sidecar = Sidecar(load(None, os.environ), clock, on_death=stop.ask, files=files)

    def start():
        sidecar.start()
        sys.stdout.write(f"{sidecar.grpc_port} {sidecar.http_port}\n")
        sys.stdout.flush()

    return 0 if asyncio.run(serve(start, sidecar.stop, stop)) else 1


if __name__ == "__main__":
    sys.exit(main())
