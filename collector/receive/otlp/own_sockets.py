"""Sockets of this process as the kernel has them: gRPC hands out none of its own.

Needs /proc and TCP_INFO, as Linux has them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_DESCRIPTORS: Final = Path("/proc/self/fd")
SOCKET: Final = "socket:"
"""Names of sockets begin so. Others are left alone: closing a copy of a file's descriptor may cost it its lock."""
_LISTENING: Final = struct.Struct("=24xII")
"""Of ``struct tcp_info`` (linux/tcp.h) of a listener: connections that wait to be accepted, and how many may
(``tcpi_unacked``, ``tcpi_sacked``)."""
_GONE: Final = (errno.ENOENT, errno.EBADF)
"""Closed since the descriptors were listed."""


def open_descriptors() -> list[str]:
    """All that are open now; none where that cannot be told."""
    try:
        return os.listdir(_DESCRIPTORS)  # noqa: PTH208 -- names are enough
    except OSError:
        return []


def count_descriptors() -> int:
    """How many are open now; 0 where that cannot be told. From Linux 6.2 on nothing is listed for it."""
    try:
        return os.stat(_DESCRIPTORS).st_size or len(open_descriptors())  # noqa: PTH116 -- every other second
    except OSError:
        return 0


def name_of(descriptor: str | int) -> str:
    """What it stands for; OSError if it is closed by now."""
    return str((_DESCRIPTORS / str(descriptor)).readlink())


@contextlib.contextmanager
def own_socket(descriptor: str) -> Iterator[socket.socket]:
    """A socket on a descriptor of ours, one at a time: the library may close its own meanwhile."""
    copy = os.dup(int(descriptor))
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def has_listener(port: int) -> bool | None:
    """Whether a socket listens on a TCP port and has room for one more connection; None where that cannot be told.

    To connect would tell as much, since the kernel takes connections by itself, and keep gRPC's threads awake for
    seconds. A kernel that has /proc and not all of this, or forbids it (a sandbox), is none that says no.
    """
    descriptors = open_descriptors()
    told = bool(descriptors)
    for descriptor in descriptors:
        try:
            if name_of(descriptor).startswith(SOCKET):
                with own_socket(descriptor) as own:
                    if _listens(own) and own.getsockname()[1] == port:
                        waiting, places = _LISTENING.unpack(
                            own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LISTENING.size)
                        )
                        return bool(waiting <= places)
        except OSError as error:
            told = told and error.errno in _GONE
        except (AttributeError, struct.error):  # no Linux
            told = False
    return False if told else None


def _listens(own: socket.socket) -> bool:
    of_tcp = own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM
    return of_tcp and bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
