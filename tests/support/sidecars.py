"""A sidecar that runs in this process, what stands in for its pipeline, and clients that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest import mock

import grpc

from collector.app import Sidecar
from collector.config.load import load
from collector.config.schema import Config
from collector.ingest.consumer import ExportConsumer
from collector.ingest.otlp_grpc import METHOD
from collector.ingest.otlp_http import CONTENT_TYPE
from collector.ingest.status import Answer
from collector.runtime import running
from collector.runtime.filesystem import SystemFiles
from collector.runtime.tasks import Clock
from collector.service import checkpoint, worker
from collector.telemetry import Counts, Signal, Transport
from exporters.snapshot_file import write_atomically
from online.snapshot import Snapshot
from tests.support.processes import on_free_ports
from tests.support.silent_calls import own_channel


def take_in(consumer: ExportConsumer, payload: bytes) -> Answer | None:
    """What a caller over gRPC that sends this export is answered; None says that it is taken."""

    async def read(_: object) -> bytes:
        return payload

    return asyncio.run(consumer.receive(Signal.TRACES, Transport.GRPC, "peer:1", len(payload), read))


class CountingProcessor:
    """In place of the pipeline: remembers what it was given, in batches; may be held back or made to fail."""

    def __init__(self) -> None:
        self.batches: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.learned_rows = 0
        self.engines = 0

    def process(self, exports, **_others) -> None:
        self.gate.wait(300)
        self.batches.append(tuple(exports))
        if self.error is not None:
            raise self.error
        self.learned_rows += sum(export.spans for export in exports)

    @property
    def revision(self) -> tuple[int, ...]:
        return self.learned_rows, self.engines, 0, 0, 0

    has_prior_prediction = False

    def take_counts(self) -> Counts:
        return Counts()

    def snapshot(self, now_unix_nano: int, generation: int) -> Snapshot:
        return Snapshot(generation=generation, created_unix_nano=now_unix_nano, tracefit_version="0", configs=[])

    def flush(self) -> None:
        pass


class NoKeeper:
    """In place of durability: nothing was left behind, nothing is kept."""

    has_log = False

    def read_unlearned(self, _):
        return []

    def record_batch(self):
        pass

    def tick(self, **_):
        return False


def make_config(directory: Path, **overrides: str) -> Config:
    """Port 0 everywhere, files under ``directory``; overrides by environment names without the prefix."""
    settings = {"PUBLISH_INTERVAL_S": "0.05", "LEARNERS": "[rls]", **overrides}
    return load(None, on_free_ports(directory, **settings))


class SmallVolume(SystemFiles):
    """A directory on a volume of so many bytes: what does not fit any more is refused as a full disk refuses it."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._directory = directory
        self._size_bytes = size_bytes

    def volume(self, _: Path | None = None) -> SimpleNamespace:
        used_bytes = sum(path.stat().st_size for path in list(self._directory.iterdir()) if path.exists())
        return SimpleNamespace(free=max(self._size_bytes - used_bytes, 0), total=self._size_bytes)

    def _fitting(self, data: bytes) -> bytes:
        if len(data) > self.volume().free:
            raise OSError(errno.ENOSPC, "No space left on device")
        return data

    def write(self, descriptor: int, data: bytes) -> int:
        return super().write(descriptor, self._fitting(data))

    def write_atomically(self, path: Path, data: bytes, mode: int) -> None:
        """A checkpoint."""
        write_atomically(path, self._fitting(data), mode)


@contextlib.contextmanager
def running_sidecar(directory: Path, files: SystemFiles | None = None, **overrides: str) -> Iterator[Sidecar]:
    """Between the times that are configured it looks at its work again and again: a test does not wait for that.

    ``halt`` stops it before the end.
    """
    sidecar = Sidecar(make_config(directory, **overrides), Clock(), files=files)
    write = getattr(files, "write_atomically", write_atomically)
    with (
        mock.patch.object(worker, "IDLE_WAIT_S", 0.05),
        mock.patch.object(checkpoint, "write_atomically", write),
        running(sidecar) as sidecar.halt,
    ):
        yield sidecar


def call_export(port: int, payload: bytes, *, timeout_s=100.0, wait=True, credentials=None, **how) -> bytes:
    """One raw call on a connection of its own; grpc.RpcError tells the status."""
    with own_channel(port, credentials) as channel:
        return channel.unary_unary(METHOD)(payload, timeout=timeout_s, wait_for_ready=wait, **how)


def code_of(port: int, payload: bytes, **how) -> grpc.StatusCode:
    """The status of such a call."""
    try:
        call_export(port, payload, **how)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def post(
    port: int,
    body: bytes,
    headers=MappingProxyType({"Content-Type": CONTENT_TYPE}),
    to=("/v1/traces", "POST"),
    tls=None,
) -> tuple[int, bytes, Message]:
    """Status, body and headers of an answer over HTTP, or HTTPS where ``tls`` says whom to trust."""
    connection = (
        HTTPSConnection("127.0.0.1", port, timeout=100, context=tls) if tls else HTTPConnection("127.0.0.1", port)
    )
    path, method = to
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers


def get(port: int, path: str) -> bytes:
    response: HTTPResponse
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return response.read()


def ready(sidecar: Sidecar) -> dict:
    """What ``/readyz`` says of a sidecar that is."""
    return json.loads(get(sidecar.http_port, "/readyz"))


def ask(port: int, path: str, **headers: str) -> tuple[int, Message, bytes]:
    """Status, headers and body."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=100) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def metric(port: int, series: str) -> float:
    """The value of one series of the page."""
    for line in get(port, "/metrics").decode().splitlines():
        if line.startswith(series + " "):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"{series} is not on the page")


def as_json(path: Path) -> dict:
    return json.loads(path.read_bytes())
