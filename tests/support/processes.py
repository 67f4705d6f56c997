"""``tracefit`` as a process: run to its end, or until the end of a block."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.clocks import eventually
from tests.support.paths import ROOT

TRACEFIT = (sys.executable, "-m", "collector")
_PORTS = re.compile(r"OTLP/gRPC on port (\d+), pages on port (\d+)")


def environment(**variables: str) -> dict[str, str]:
    """That of this process without its settings of tracefit."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRACEFIT_")}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def on_free_ports(directory: Path, **settings: str) -> dict[str, str]:
    """Variables of a sidecar with its files there; ``settings`` by their names without the prefix."""
    ports = dict.fromkeys(("LISTEN", "LISTEN_HTTP", "PAGES"), "127.0.0.1:0")
    values = {**ports, "DIRECTORY": str(directory), **settings}
    return {f"TRACEFIT_{name}": value for name, value in values.items()}


def tracefit(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command, run to its end."""
    command = [*TRACEFIT, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=environment(**variables)
    )


def free_port(following: int = 0) -> int:
    """A port that nobody has, nor those that follow it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
            try:
                for more in range(port + 1, port + 1 + following):
                    socket.create_server(("127.0.0.1", more)).close()
            except (OSError, OverflowError):
                continue
            return port


def output_of(*command: object, **more: Any) -> str:
    """What a command writes that has to succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Running(NamedTuple):
    """A sidecar in a process of its own, its ports, and where it writes its log."""

    process: subprocess.Popen[str]
    grpc_port: int
    http_port: int
    log: Path


@contextmanager
def running_process(
    directory: Path, *arguments: str, wrapper: Sequence[str] = (), **settings: str
) -> Iterator[Running]:
    """``tracefit run`` on free ports once it is ready; ``settings`` by environment names without the prefix."""
    directory.mkdir(exist_ok=True)
    log = directory / "stderr.txt"
    with log.open("w") as stderr:
        command = [*wrapper, *TRACEFIT, "run", *arguments]
        process = subprocess.Popen(
            command, stderr=stderr, text=True, env=environment(**on_free_ports(directory, **settings))
        )
    try:
        eventually(lambda: process.poll() is not None or _PORTS.search(log.read_text()))
        ports = _PORTS.search(log.read_text())
        assert ports, log.read_text()
        yield Running(process, int(ports[1]), int(ports[2]), log)
    finally:
        process.terminate()
        process.wait(100)
