"""Health by check-in: a subsystem that stops calling is dead, whatever it said before.

*Alive* means that every registered subsystem checked in within its deadline; *ready* means alive and told to serve.
A draining process is alive and not ready. Learning nothing is neither: readiness gates the whole pod, so it must not
wait for telemetry. (After Refinery's internal/health.)
"""

from __future__ import annotations

import threading

from .clock import Clock


class Health:
    """Written by the subsystems, read by the HTTP and gRPC health endpoints."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        """Guards everything below."""
        self._timeout_ns: dict[str, int] = {}
        self._due_ns: dict[str, int] = {}
        self._serving = False

    def register(self, name: str, timeout_s: float) -> None:
        """From now on ``name`` has to check in at least every ``timeout_s``."""
        with self._lock:
            self._timeout_ns[name] = int(timeout_s * 1e9)
            self._due_ns[name] = self._clock.monotonic_ns() + self._timeout_ns[name]

    def check_in(self, name: str, pause_s: float = 0.0) -> None:
        """The subsystem is at work, and will be again after a pause; of no effect once it is unregistered."""
        with self._lock:
            timeout_ns = self._timeout_ns.get(name)
            if timeout_ns is not None:
                self._due_ns[name] = self._clock.monotonic_ns() + timeout_ns + int(pause_s * 1e9)

    def unregister(self, name: str) -> None:
        """The subsystem ended as it should."""
        with self._lock:
            self._timeout_ns.pop(name, None)
            self._due_ns.pop(name, None)

    def set_serving(self, serving: bool) -> None:
        """The receivers are open (or not any more)."""
        with self._lock:
            self._serving = serving

    def late(self) -> tuple[str, ...]:
        """Subsystems that missed their deadline."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            return tuple(name for name, due_ns in self._due_ns.items() if now_ns > due_ns)

    def alive(self) -> bool:
        """Whether every part has checked in in time."""
        return not self.late()

    def ready(self) -> bool:
        """Alive, and the receivers are open."""
        with self._lock:
            serving = self._serving
        return serving and self.alive()
