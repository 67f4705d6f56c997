"""What the process is made of: parts that start and stop, and the tasks in which they take their turns.

A :class:`Part` is started once and stopped once, in the order of a list (collector/app.py) and back. Whatever of ours
runs beside the main thread is a :class:`Task`: a name, a turn, and how long a turn may take before the task counts as
hung (collector/runtime/health.py). Else only servers start threads: gRPC its own, the HTTP server one for each
connection.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from .health import Health

STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Part(Protocol):
    """Something that runs from ``start`` to ``stop``; either is called at most once."""

    def start(self) -> None:
        """Take what is needed (a port, a directory) and run; StartError or ConfigError if that cannot be."""
        ...

    def stop(self) -> bool:
        """End, also if it never started; False if something acknowledged was lost."""
        ...


class Task:
    """A thread of its own that takes turns until it is stopped, or until a turn says that it was the last.

    The first turn comes at once. A turn that raises is logged and ends the task, which then misses its check-in.

    Args:
        name: of the thread, and in health.
        turn: one turn; returns the seconds to pause before the next, None after the last.
        health: where to check in after every turn; None if nobody depends on this task.
        turn_timeout_s: the longest turn; a task that takes longer, beyond its pause, is late.
        is_well: whether the end of a turn may count as a check-in: behind a listener may be a deadlock.
        on_death: called when a turn has raised.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        *,
        health: Health | None = None,
        turn_timeout_s: float = 60.0,
        is_well: Callable[[], bool] = lambda: True,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.died = False
        self._turn = turn
        self._health = health
        self._turn_timeout_s = turn_timeout_s
        self._is_well = is_well
        self._on_death = on_death
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; from now on it has to check in."""
        if self._health is not None:
            self._health.register(self.name, self._turn_timeout_s)
        self._thread.start()

    def wake(self) -> None:
        """End the pause: there is something to do."""
        self._wake.set()

    def request_stop(self) -> None:
        """No turn after the one under way."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; whether it has ended, which it also has if it never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self.running

    def stop(self, timeout_s: float | None = STOP_TIMEOUT_S) -> bool:
        """Request the stop and wait for the turn under way (None: as long as it takes); whether it has ended."""
        self.request_stop()
        return self.join(timeout_s)

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping and (pause_s := self._turn()) is not None:
                if self._health is not None and self._is_well():
                    self._health.check_in(self.name, pause_s)
                self._wake.wait(pause_s)
                self._wake.clear()
        except BaseException:  # noqa: BLE001 -- whatever it was, health or on_death must tell
            self.died = True
            _log.exception("%s died", self.name)
            self._on_death()
        else:
            if self._health is not None:
                self._health.unregister(self.name)
