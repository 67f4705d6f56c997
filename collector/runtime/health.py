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
        self._deadline_ns: dict[str, int] = {}
        self._seen_ns: dict[str, int] = {}
        self._serving = False

    def register(self, name: str, timeout_s: float) -> None:
        """From now on ``name`` has to check in at least every ``timeout_s``."""
        with self._lock:
            self._deadline_ns[name] = int(timeout_s * 1e9)
            self._seen_ns[name] = self._clock.monotonic_ns()

    def check_in(self, name: str) -> None:
        """The subsystem is at work."""
        with self._lock:
            self._seen_ns[name] = self._clock.monotonic_ns()

    def unregister(self, name: str) -> None:
        """The subsystem ended as it should."""
        with self._lock:
            self._deadline_ns.pop(name, None)
            self._seen_ns.pop(name, None)

    def set_serving(self, serving: bool) -> None:
        """The receivers are open (or not any more)."""
        with self._lock:
            self._serving = serving

    def late(self) -> tuple[str, ...]:
        """Subsystems that missed their deadline."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            return tuple(
                name for name, timeout_ns in self._deadline_ns.items() if now_ns - self._seen_ns[name] > timeout_ns
            )

    def alive(self) -> bool:
        """Nobody is late."""
        return not self.late()

    def ready(self) -> bool:
        """Alive, and the receivers are open."""
        with self._lock:
            serving = self._serving
        return serving and self.alive()
