"""Clock, health and tasks: what every thread of the process needs.

Clocks come in as arguments: a test passes its own, and nothing else here reads the time.

A subsystem that stops checking in is dead, whatever it said before. *Alive* means that every registered one checked in
within its deadline; *ready* means alive and told to serve. A draining process is alive and not ready. Learning nothing
is neither: readiness gates the whole pod, so it must not wait for telemetry. (After Refinery's internal/health.)

The process is made of parts. A :class:`Part` is started once and stopped once, in the order of a list
(collector/app.py) and back. All I/O happens in one loop (collector/runtime/loop.py); what computes or writes files is a
:class:`Task` with a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock:
    """What the process may know about time: the clocks of this machine, or those of a test."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never run backwards; for waiting and deadlines."""
        return time.monotonic_ns()

    def unix_nano(self) -> int:
        """Wall clock in nanoseconds since the epoch; for stamps that people read."""
        return time.time_ns()


class SteadyClock:
    """The wall clock, except that it never goes back: when it is set back, nobody else's clock seems to be ahead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ns = clock.unix_nano() - clock.monotonic_ns()

    def unix_nano(self) -> int:
        """Wall clock in nanoseconds since the epoch; from any thread."""
        monotonic_ns = self._clock.monotonic_ns()
        self._offset_ns = max(self._offset_ns, self._clock.unix_nano() - monotonic_ns)
        return monotonic_ns + self._offset_ns


class Health:
    """Written by the subsystems, each by its name; read by the HTTP and gRPC health endpoints."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: dict[str, tuple[int, int]] = {}
        """Nanoseconds within which each has to check in, and when the next time is due."""
        self._serving = False

    def register(self, name: str, timeout_s: float) -> None:
        """Require ``name`` to check in at least every ``timeout_s``."""
        timeout_ns = int(timeout_s * 1e9)
        self._parts[name] = timeout_ns, self._clock.monotonic_ns() + timeout_ns

    def check_in(self, name: str, pause_s: float = 0.0) -> None:
        """Record that a registered subsystem works, and will again after a pause."""
        timeout_ns, _ = self._parts[name]
        self._parts[name] = timeout_ns, self._clock.monotonic_ns() + timeout_ns + int(pause_s * 1e9)

    def unregister(self, name: str) -> None:
        """Remove a subsystem that ended in order."""
        del self._parts[name]

    def fail(self, name: str) -> None:
        """Mark a subsystem as dead: it is late from now on."""
        self._parts[name] = 0, -1

    def set_serving(self, serving: bool) -> None:
        """Set whether the receivers are open."""
        self._serving = serving

    def late(self) -> tuple[str, ...]:
        """Subsystems that missed their deadline."""
        now_ns = self._clock.monotonic_ns()
        return tuple(name for name, (_, due_ns) in self._parts.copy().items() if now_ns > due_ns)

    def probe_alive(self) -> tuple[bool, dict[str, object]]:
        """Whether every part has checked in in time, and for a page those that have not."""
        late = self.late()
        return not late, {"late": list(late)}

    def ready(self) -> bool:
        """Alive, and the receivers are open."""
        return self._serving and not self.late()


_log = logging.getLogger(__name__)


class Part(Protocol):
    """Something that runs from ``start`` to ``stop``, which are called in the loop, each at most once."""

    async def start(self) -> None:
        """Take what is needed (a port, a directory) and run; StartError or ConfigError if that cannot be."""
        ...

    async def stop(self) -> bool:
        """End, also if it never started; False if something acknowledged was lost."""
        ...


class Task:
    """A thread that calls one function again and again, until it is stopped or the function returns None.

    The first call comes at once. A call that raises is logged and ends the task, which then misses its check-in.

    Args:
        name: of the thread, and in health.
        iterate: does one iteration; returns the seconds to pause before the next, None after the last.
        health: where to check in after every iteration.
        timeout_s: the longest iteration; a task that takes longer, beyond its pause, is late.
        on_death: called when an iteration has raised.
    """

    def __init__(
        self,
        name: str,
        iterate: Callable[[], float | None],
        *,
        health: Health,
        timeout_s: float,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.died = False
        self._iterate = iterate
        self._health = health
        self._timeout_s = timeout_s
        self._on_death = on_death
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; from now on it has to check in."""
        self._health.register(self.name, self._timeout_s)
        self._thread.start()

    def notify(self) -> None:
        """End the pause: there is something to do."""
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; whether it has ended, which it also has if it never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, timeout_s: float | None) -> bool:
        """Request the stop and wait for the iteration under way (None: as long as it takes); whether it has ended."""
        self._stopping = True
        self._wake.set()
        return self.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping and (pause_s := self._iterate()) is not None:
                self._health.check_in(self.name, pause_s)
                self._wake.wait(pause_s)
                self._wake.clear()
        except BaseException:  # noqa: BLE001 -- whatever it was, health or on_death must tell
            self.died = True
            _log.exception("%s died", self.name)
            self._on_death()
        else:
            self._health.unregister(self.name)
