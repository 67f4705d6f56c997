"""Thousands of connections that say nothing, at every port, and a new client that wants in.

    python -m tests.torture.crowds [--connections 5000]

``silent`` connects and is quiet; ``half a request`` stops in its middle. A new client comes every half
second, five times. A second client was there before, and exports on.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import grpc

from collector.receive.otlp.otlp_grpc import METHOD
from tests.bench.ingest_load import free_port
from tests.torture.harness import Victim, make_exports, said

WAIT_S = 3.0
PATIENCE_S = 60.0
HALF = b"POST /v1/traces HTTP/1.1\r\nHost: tracefit\r\n"


class Crowd(NamedTuple):
    """What a run showed of one kind of connections at one port."""

    port: str
    kind: str
    longest_s: float


@contextlib.contextmanager
def crowd(port, size, words):
    """Connections that have said these words and nothing more."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(size)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        for client in clients if words else ():
            with contextlib.suppress(OSError):
                client.settimeout(0.2)
                client.sendall(words)
        time.sleep(0.5)  # lets them arrive
        yield


def _waited_s(attempt):
    """How long a client is kept out that tries until it is served."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < PATIENCE_S:
        with contextlib.suppress(OSError, grpc.RpcError):
            attempt()
            break
        time.sleep(0.05)
    waited_s = time.monotonic() - begun_s
    time.sleep(0.5)
    return waited_s


def _export(port):
    own = [("grpc.use_local_subchannel_pool", 1)]  # else it shares the other client's connection
    with grpc.insecure_channel(f"127.0.0.1:{port}", own) as channel:
        channel.unary_unary(METHOD)(make_exports(0, 1, 10), timeout=5)


def _ask(port):
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError as error:  # an answer, too
        error.close()


def run(directory: Path, connections=5000) -> list[Crowd]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections, http_port = min(connections, hard // 2), free_port()
    endpoint = f"127.0.0.1:{http_port}"
    victim = Victim(directory, DURABILITY="memory", RECEIVERS__HTTP__ENABLED="true", RECEIVERS__HTTP__ENDPOINT=endpoint)
    ports = {"gRPC": victim.grpc_port, "OTLP/HTTP": http_port, "pages": victim.http_port}
    crowds = []
    with grpc.insecure_channel(f"127.0.0.1:{victim.grpc_port}") as channel:
        call = channel.unary_unary(METHOD)
        call(make_exports(1, 1, 10), timeout=60)
        for name, port in ports.items():
            attempt = _export if name == "gRPC" else _ask
            kinds = {"silent": b""} if name == "gRPC" else {"silent": b"", "half a request": HALF}
            for kind, words in kinds.items():
                with crowd(port, connections, words):
                    longest_s = max(_waited_s(lambda attempt=attempt, port=port: attempt(port)) for _ in range(5))
                    call(make_exports(1, 11, 10), timeout=60)
                crowds.append(Crowd(name, kind, longest_s))
    if victim.end(15) != 0:
        raise AssertionError(said(directory)[-3000:])
    return crowds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    with tempfile.TemporaryDirectory() as directory:
        crowds = run(Path(directory) / "life", parser.parse_args().connections)
    for each in crowds:
        sys.stdout.write(f"{each.port}, {each.kind}: a new client waited {each.longest_s:.1f} s at most\n")
    return 1 if max(each.longest_s for each in crowds) > WAIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
