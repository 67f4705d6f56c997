"""The OpenTelemetry Collector as a peer: built with its own builder where Go is there, and run on the servers' CPU.

Two pipelines: what comes is dropped (``nop``), or goes through a queue on disk first (``queue``). It tells nothing of
itself and has one thread for Go code, as the servers beside it have one CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.bench.ingest_load import ROOT, SERVER_CPU, Server, free_port

VERSION = "0.161.0"
MODULES = {
    "receivers": ("go.opentelemetry.io/collector/receiver/otlpreceiver",),
    "exporters": (
        "go.opentelemetry.io/collector/exporter/nopexporter",
        "go.opentelemetry.io/collector/exporter/debugexporter",
    ),
    "extensions": ("github.com/open-telemetry/opentelemetry-collector-contrib/extension/storage/filestorage",),
}
BUILDER = f"go.opentelemetry.io/collector/cmd/builder@v{VERSION}"
KINDS = ("nop", "queue")


def build():
    """The program, made once and kept under build/; None where there is no Go."""
    directory = ROOT / "build" / "peers" / VERSION
    program = directory / "otelcol"
    if not program.exists():
        go = shutil.which("go")
        if go is None:
            return None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "builder.yaml").write_text(_manifest(directory))
        subprocess.run([go, "run", BUILDER, "--config", str(directory / "builder.yaml")], check=True, cwd=directory)
    return program


def _manifest(directory):
    lines = [f"dist: {{name: otelcol, output_path: {directory}, version: {VERSION}}}"]
    for kind, modules in MODULES.items():
        lines += [f"{kind}:", *(f"  - gomod: {module} v{VERSION}" for module in modules)]
    return "\n".join(lines) + "\n"


def _config(kind, port, directory):
    """Its configuration file; JSON is YAML."""
    queued = kind == "queue"
    exporter = "debug" if queued else "nop"
    settings = {"verbosity": "basic", "sending_queue": {"storage": "file_storage"}} if queued else {}
    extensions = {"file_storage": {"directory": directory}} if queued else {}
    grpc = {"endpoint": f"127.0.0.1:{port}", "max_recv_msg_size_mib": 64}
    return json.dumps(
        {
            "receivers": {"otlp": {"protocols": {"grpc": grpc}}},
            "exporters": {exporter: settings},
            "extensions": extensions,
            "service": {
                "extensions": [*extensions],
                "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "error"}},
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": [exporter]}},
            },
        }
    )


@contextlib.contextmanager
def collector(program, kind):
    """One that is ready; ``kind`` as in KINDS."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as log:
        port, path = free_port(), Path(directory) / "config.yaml"
        path.write_text(_config(kind, port, directory))
        command = ["taskset", "-c", str(SERVER_CPU), str(program), "--config", str(path)]
        process = subprocess.Popen(command, env={**os.environ, "GOMAXPROCS": "1"}, stderr=log)
        try:
            _await_port(process, port, log)
            yield Server(process, port)
        finally:
            process.terminate()
            process.wait(60)


def _await_port(process, port, log):
    for _ in range(200):
        if process.poll() is not None:
            log.seek(0)
            raise RuntimeError(log.read())
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("the Collector did not start")
