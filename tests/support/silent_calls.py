"""A client whose calls never bring their message."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import grpc

from collector.ingest.otlp_grpc import METHOD


@contextlib.contextmanager
def own_channel(port: int, credentials: grpc.ChannelCredentials | None = None) -> Iterator[grpc.Channel]:
    """A connection that no other channel of this process shares."""
    target, options = f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
    with (
        grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
    ) as channel:
        yield channel


@contextlib.contextmanager
def silent_calls(channel: grpc.Channel, count: int) -> Iterator[list[grpc.Future]]:
    """Calls that are begun on a channel and wait, as far as the server lets them; they end with the block."""
    over = threading.Event()

    def no_message() -> Iterator[bytes]:
        over.wait(600)
        yield from ()

    calls = [channel.stream_unary(METHOD).future(no_message()) for _ in range(count)]
    try:
        yield calls
    finally:
        over.set()
        for call in calls:
            call.cancel()
