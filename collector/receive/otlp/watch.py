"""Does a receiver still receive? What its listener shows, and whether an export hangs in it.

A receiver checks in with :class:`~collector.runtime.Health` only while both are well, so that a deadlock behind a
listener that still accepts is told as what it is. Exports wait for room at most ``queue.wait_s``; one that is under way
for ``HUNG_S`` waits for something that does not come (a lock, a disk), and only a restart helps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor

from collector.receive.admission import Refused
from collector.runtime import Clock
from collector.telemetry import Transport

from .grpc_probe import Answer

CHECK_EVERY_S = 20.0
CHECK_IN_TIMEOUT_S = 60.0
"""Two checks may fail, as in a process that got no processor for a while."""
HUNG_S = 60.0
POOL_WAIT_S = 5.0

Offer = Callable[[bytes, str, Transport, float | None], Refused | None]


class WatchedOffer:
    """``offer`` of one receiver, and since when calls are in it."""

    def __init__(self, offer: Offer, clock: Clock, check_in: Callable[[], None]) -> None:
        self._offer = offer
        self._clock = clock
        self._check_in = check_in
        self._since_ns: dict[int, int] = {}

    def __call__(self, payload: bytes, peer: str, transport: Transport, wait_s: float | None) -> Refused | None:
        """Hand the export on."""
        thread = threading.get_ident()
        self._since_ns[thread] = self._clock.monotonic_ns()
        try:
            return self._offer(payload, peer, transport, wait_s)
        finally:
            del self._since_ns[thread]

    @property
    def hung(self) -> bool:
        """Whether an export has been under way for too long."""
        oldest_ns = min(tuple(self._since_ns.values()), default=None)  # a tuple: made in one go, without a lock
        return oldest_ns is not None and self._clock.monotonic_ns() - oldest_ns > HUNG_S * 1e9

    def check_in(self) -> None:
        """The listener is well; so is the receiver, unless an export hangs."""
        if not self.hung:
            self._check_in()


class SelfCheck:
    """Calls a gRPC server now and then, and checks in when it answers.

    Where the server closes the connection instead (see grpc_probe), its handlers' pool has to run a task.
    """

    def __init__(self, call: Callable[[], Answer], pool: Executor, check_in: Callable[[], None]) -> None:
        self._call = call
        self._pool = pool
        self._check_in = check_in
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grpc-check", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, at once or with the check under way."""
        self._stop.set()

    def look(self) -> None:
        """One check."""
        answer = self._call()
        if answer is Answer.SERVING or (answer is Answer.CLOSED and self._pool_runs()):
            self._check_in()

    def _pool_runs(self) -> bool:
        ran = threading.Event()
        try:
            self._pool.submit(ran.set)
        except RuntimeError:  # shut down
            return False
        return ran.wait(POOL_WAIT_S)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_EVERY_S):
            self.look()
