"""Says whose page is read, and whose is not and why, when that changes: several servers to a line."""

from __future__ import annotations

import logging
import threading

from collector.telemetry import ScrapeOutcome

EVERY_S = 15.0
"""More than the time for which a logger holds back what it has just said."""
SERVERS_SHOWN = 10
_log = logging.getLogger(__name__)


class OutcomeLog:
    """From any thread; nobody waits for another's line to be written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: dict[str, str] = {}
        self._due_ns = 0

    def note(self, server: str, news: str, now_ns: int) -> None:
        """Remember what came of asking this server, if it is news, and say what is to be said by now."""
        with self._lock:
            if news:
                self._news[server] = news
            if not self._news or now_ns < self._due_ns:
                return
            told, self._news = self._news, {}
            self._due_ns = now_ns + int(EVERY_S * 1e9)
        read = [server for server, outcome in told.items() if outcome == ScrapeOutcome.TAKEN]
        failed = [f"{server} ({outcome})" for server, outcome in told.items() if outcome != ScrapeOutcome.TAKEN]
        if read:
            _log.info("page read of %s", _listed(read))
        if failed:
            _log.warning("no page of %s", _listed(failed))


def _listed(servers: list[str]) -> str:
    more = len(servers) - SERVERS_SHOWN
    return ", ".join(servers[:SERVERS_SHOWN]) + (f" and {more} more" if more > 0 else "")
