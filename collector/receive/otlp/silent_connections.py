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
import socket
import struct
from typing import Final, NamedTuple

from .own_sockets import SOCKET, count_descriptors, name_of, open_descriptors, own_socket

SILENT_MS: Final = 1000
SHARE: Final = 4
"""Of the places, a fourth is made free at once."""

_TCP_INFO: Final = struct.Struct("=52xI72xQ")
"""Of ``struct tcp_info`` (linux/tcp.h): ms since the last data came, and the bytes that came in all
(``tcpi_last_data_recv``, ``tcpi_bytes_received``)."""
_HANDSHAKE_BYTES: Final = 512
"""Preface, settings and the pings of a client without a call are some 150."""

_log = logging.getLogger(__name__)


class _Accepted(NamedTuple):
    """A connection that was accepted on the port; the most silent sort last."""

    without_call: bool
    silent_ms: int
    descriptor: str
    name: str
    """As the kernel has it: a descriptor may be another connection's by the time it is shut."""


class SilentConnections:
    """Looks after the places of one server; ``make_room`` is asked again and again, by one thread."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._crowded = False

    def make_room(self, port: int) -> int:
        """Shut connections accepted on a port that are silent longest, if there is no place left; how many."""
        accepted = _accepted_on(port) if port and count_descriptors() >= self._places else []
        if len(accepted) < self._places:
            self._crowded = False
            return 0
        chosen = _most_silent(accepted)[: -(-self._places // SHARE)]
        for connection in chosen:
            _shut(connection)
        if chosen and not self._crowded:  # one line per crowd
            self._crowded = True
            _log.warning("all %d places for gRPC connections are taken: the most silent give way", self._places)
        return len(chosen)


def _accepted_on(port: int) -> list[_Accepted]:
    found: dict[str, _Accepted] = {}
    for descriptor in open_descriptors():
        with contextlib.suppress(OSError, AttributeError, struct.error):  # gone, or no Linux
            name = name_of(descriptor)
            if not name.startswith(SOCKET):
                continue
            with own_socket(descriptor) as connection:
                if not _is_accepted(connection, port):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            silent_ms, received_bytes = _TCP_INFO.unpack(info)
            found[name] = _Accepted(received_bytes <= _HANDSHAKE_BYTES, silent_ms, descriptor, name)
    return list(found.values())


def _most_silent(accepted: list[_Accepted]) -> list[_Accepted]:
    """Those that may give way, the longest silent first: who made a call only when everybody here has."""
    ranked = sorted(accepted, reverse=True)
    return [each for each in ranked if each.silent_ms >= SILENT_MS and each.without_call is ranked[0].without_call]


def _shut(accepted: _Accepted) -> None:
    with contextlib.suppress(OSError), own_socket(accepted.descriptor) as connection:
        if name_of(connection.fileno()) == accepted.name:
            connection.shutdown(socket.SHUT_RDWR)


def _is_accepted(connection: socket.socket, port: int) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        connection.getpeername()
    except OSError:  # it listens, or its client has gone
        return False
    return bool(connection.getsockname()[1] == port)
