"""Room for a new client, when connections that say nothing hold every place of a gRPC server.

gRPC bounds how many connections it holds and turns newcomers away. It has no means to prefer them to a connection
that completed the HTTP/2 handshake and said no more: that one keeps its place for ever, since a limit for idle ones
would also cut off senders between two exports, some of which are known by nothing but their connection. So while all
places are taken, those without a call so far that were silent longest are shut from outside (without any of those,
those with one); gRPC takes them for clients that have gone.

Needs /proc and TCP_INFO; without them nothing is shut.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SILENT_MS: Final = 1000
SHARE: Final = 4
"""Of the places, a fourth is made free at once."""

_DESCRIPTORS: Final = Path("/proc/self/fd")
_TCP_INFO: Final = struct.Struct("=52xI72xQ")
"""Of ``struct tcp_info`` (linux/tcp.h): ms since the last data came, and the bytes that came in all
(``tcpi_last_data_recv``, ``tcpi_bytes_received``)."""
_HANDSHAKE_BYTES: Final = 512
"""Preface, settings and the pings of a client without a call are some 150."""

_log = logging.getLogger(__name__)


class SilentConnections:
    """Looks after the places of one server; ``make_room`` is asked again and again, by one thread."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._crowded = False

    def make_room(self, port: int) -> int:
        """Shut connections accepted on a port that are silent longest, if there is no place left; how many."""
        descriptors = _open_descriptors() if port else []
        if len(descriptors) < self._places:
            self._crowded = False
            return 0
        with contextlib.ExitStack() as stack:
            accepted = [stack.enter_context(connection) for connection in _accepted_on(port, descriptors)]
            if len(accepted) < self._places:
                self._crowded = False
                return 0
            chosen = _most_silent(accepted)[: -(-self._places // SHARE)]
            for connection in chosen:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if chosen and not self._crowded:  # one line per crowd
            self._crowded = True
            _log.warning("all %d places for gRPC connections are taken: the most silent give way", self._places)
        return len(chosen)


def _open_descriptors() -> list[str]:
    try:
        return os.listdir(_DESCRIPTORS)  # noqa: PTH208 -- twice a second: names are enough
    except OSError:
        return []


def _accepted_on(port: int, descriptors: list[str]) -> Iterator[socket.socket]:
    """Connections that were accepted on a port, on descriptors of ours: the library may close its own meanwhile."""
    found: set[str] = set()
    for number in descriptors:
        with contextlib.suppress(OSError):
            name = str((_DESCRIPTORS / number).readlink())
            if name in found or not name.startswith("socket:"):
                continue  # ours, or a file: closing a copy of that may cost it its lock
            found.add(name)
            descriptor = os.dup(int(number))
            try:
                own = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                continue
            if _is_accepted(own, port):
                yield own
            else:
                own.close()


def _is_accepted(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        connection.getpeername()
    except OSError:  # it listens, or its client has gone
        return False
    return bool(connection.getsockname()[1] == port)


def _most_silent(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that may give way, the longest silent first: who made a call only when everybody here has."""
    ranked: list[tuple[bool, int, socket.socket]] = []
    for connection in connections:
        with contextlib.suppress(OSError, AttributeError, struct.error):  # gone, or no Linux
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            silent_ms, received_bytes = _TCP_INFO.unpack(info)
            ranked.append((received_bytes <= _HANDSHAKE_BYTES, silent_ms, connection))
    ranked.sort(key=lambda each: each[:2], reverse=True)
    return [own for without_call, silent_ms, own in ranked if silent_ms >= SILENT_MS and without_call is ranked[0][0]]
