"""How a process learns that it should end: a pipe, because a signal handler may interrupt any lock, also an Event's."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Stop:
    """Asked once it ends in order; a second signal ends the process at once."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._signalled = False

    def ask(self) -> None:
        """Ask for the stop, from any thread."""
        os.write(self._write_end, b".")

    @property
    def asked(self) -> bool:
        """A signal has asked for it."""
        return self._signalled

    def wait(self) -> None:
        """Block until somebody asked for the stop."""
        os.read(self._read_end, 1)

    def listen(self) -> None:
        """SIGTERM and SIGINT ask; from the main thread."""
        os.set_blocking(self._write_end, False)
        # the C handler writes, whichever thread it runs in: one that runs elsewhere does not interrupt our read
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._signalled:
            os._exit(128 + number)
        self._signalled = True
