"""Processes of the demo: a stock vLLM with the plugin, and the sidecar; each ends with its context."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

STOP_S: Final = 20.0


class ServerError(Exception):
    """A process did not come up; the text holds the end of its log."""


class Server(NamedTuple):
    """A running vLLM."""

    port: int
    log: Path
    pid: int


def free_port(wanted: int = 0) -> int:
    """Return the wanted port if nobody has it, else another one."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ServerError("no free port on 127.0.0.1")


def get(port: int, path: str) -> bytes | None:
    """Return the page, or None if there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            body: bytes = response.read()
            return body
    except (urllib.error.URLError, OSError):
        return None


@contextlib.contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; on leaving, the whole session is ended."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=directory, start_new_session=True
        )
    try:
        yield child
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if sign is signal.SIGTERM:
                child.send_signal(sign)  # vLLM's front end ends its engine core and workers itself
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, sign)  # whatever of the session is left
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_S)


def wait_until_up(child: subprocess.Popen[bytes], port: int, path: str, log: Path, timeout_s: float) -> None:
    """Wait for a page to be served."""
    deadline = time.monotonic() + timeout_s
    while get(port, path) is None:
        if child.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").strip().splitlines()[-8:]
            raise ServerError(f"{log.stem} did not come up:\n" + "\n".join(tail))
        time.sleep(0.25)


@contextlib.contextmanager
def vllm(binaries: Path, model: Path, endpoint: str, work: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """Run ``vllm serve`` on the tiny model with the plugin's scheduler, which tells its steps to this endpoint."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port(8000)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "TRACEFIT", "VLLM_"))},
        "TRACEFITVLLM_ENDPOINT": endpoint,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: max(1, len(cores) // 2)])),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    shape = ["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    command = [str(binaries / "vllm"), "serve", str(model), "--served-model-name", "tiny", "--load-format", "dummy"]
    command += ["--scheduler-cls", "tracefit_vllm.TracedScheduler", "--dtype", "float32", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), *shape, *flags]
    log = work / "vllm.log"
    with process(command, environment, log, work) as child:
        wait_until_up(child, port, "/health", log, timeout_s=300)
        yield Server(port, log, child.pid)
