"""A server on one CPU, the load generator on the other, and what it reports.

All CPU figures are the server's, as the kernel accounts them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

SERVER_CPU, LOAD_CPU = 0, 1
ROOT = Path(__file__).parents[2]


def pinned(cpu, *command, env=os.environ, **kwargs):
    """A Python process on one CPU, which finds its bytecode compiled as that of an installed package is."""
    compiled = {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiled["PYTHONPYCACHEPREFIX"] = str(bytecode())
    command = ["taskset", "-c", str(cpu), sys.executable, *map(str, command)]
    return subprocess.Popen(command, text=True, env=compiled, **kwargs)


@functools.cache
def bytecode():
    """Where it is; compiled before anything is measured, and gone with this process."""
    directory = Path(tempfile.mkdtemp(prefix="tracefit-bench-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = str(directory)
    imports = ("collector.app", "collector.commands.replay", "tests.bench.servers", "tests.bench.send_load")
    learners = ("river.base", "river.drift", "river.linear_model", "river.optim", "river.preprocessing")
    subprocess.run([sys.executable, "-c", f"import {', '.join(imports + learners)}"], env=environ, check=True, cwd=ROOT)
    return directory


class Server:
    """A process with a gRPC port; ``pages`` is the port of its pages and ``log`` what it says, if it has them."""

    def __init__(self, process, port, pages=0, log=None):
        self.process, self.port, self.pages, self._log = process, port, pages, log

    @property
    def pid(self):
        return self.process.pid

    def rss_mb(self):
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def cpu_s(self):
        """With that of threads that have ended: the clock that clock_getcpuclockid(3) names, to the nanosecond."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def learned_rows(self):
        """Rows of each target learned so far, by its pages; none of a server without pages."""
        if not self.pages:
            return {}
        with urllib.request.urlopen(f"http://127.0.0.1:{self.pages}/metrics", timeout=60) as page:
            text = page.read().decode()
        series = re.findall(r'^tracefit_rows_total\{outcome="learned",target="(\w+)"\} (\S+)', text, re.MULTILINE)
        return {target: float(rows) for target, rows in series}

    def said(self):
        """Its log so far."""
        return "" if self._log is None else os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def stop(self, wait_s=30):
        """Terminate; True if it ended well."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(wait_s) == 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def bare(kind):
    process = pinned(SERVER_CPU, "-m", "tests.bench.servers", kind, stdout=subprocess.PIPE)
    try:
        yield Server(process, int(process.stdout.readline().split()[1]))
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def sidecar(*arguments, directory, **settings):
    """``tracefit run`` with environment settings (without their prefix)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRACEFIT_")}
    environ |= {
        "TRACEFIT_RECEIVERS__GRPC__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_RECEIVERS__HTTP__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_EXPORTERS__HTTP__ENDPOINT": "127.0.0.1:0",
        "TRACEFIT_SNAPSHOT__DIRECTORY": str(directory),
        **{f"TRACEFIT_{name}": value for name, value in settings.items()},
    }
    with tempfile.TemporaryFile("w+") as log:
        process = pinned(SERVER_CPU, "-m", "collector", "run", *arguments, stderr=log, env=environ)
        try:
            yield Server(process, *_ports(process, log), log)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def _ports(process, log):
    for _ in range(2000):
        log.seek(0)
        text = log.read()
        if found := re.search(r"OTLP/gRPC on port (\d+), pages on port (\d+)", text):
            return int(found[1]), int(found[2])
        if process.poll() is not None:
            raise RuntimeError(text)
        time.sleep(0.005)
    raise RuntimeError("the sidecar did not start")


def send(server, *, settle_s=2.0, **options):
    """The generator's report for a load with these options (True for flags), and what the server spent on it.

    What it was warmed up with is not part of what it spent, nor of the rows that it learned meanwhile.
    """
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    process = pinned(LOAD_CPU, "-m", "tests.bench.send_load", "--target", f"127.0.0.1:{server.port}", *arguments,
                     stdout=subprocess.PIPE)  # fmt: skip
    begun = json.loads(process.stdout.readline())
    rows_before = server.learned_rows()
    before_s, before_mb = server.cpu_s(), server.rss_mb()
    highest_mb = before_mb
    while process.poll() is None:
        highest_mb = max(highest_mb, server.rss_mb())
        time.sleep(0.1)
    report = begun | json.loads(process.stdout.read())
    time.sleep(settle_s)
    cpu_s, wall_s = server.cpu_s() - before_s, report["seconds"] + settle_s
    report["server"] = {
        "us_per_step": cpu_s / max(report["steps"], 1) * 1e6,
        "millicores": cpu_s / wall_s * 1e3,
        "learned_rows": {name: rows - rows_before.get(name, 0.0) for name, rows in server.learned_rows().items()},
        "rss_before_mb": before_mb,
        "rss_max_mb": max(highest_mb, server.rss_mb()),
    }
    return report


def snapshot(directory):
    return json.loads((Path(directory) / "snapshot.json").read_text())
