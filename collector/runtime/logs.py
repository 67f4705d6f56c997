"""Logs for people: a line per change of state, and the same complaint at most every ten seconds.

Whatever happens per item is a counter; a log line about it would fill the disk when it is needed least.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

from .clock import Clock

INTERVAL_S = 10.0
TOLD_ONCE = {"told_once": True}
"""As ``extra`` of a line that is news of one thing: who writes it does so once, and others are not like it."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class OncePerInterval(logging.Filter):
    """Lets a message text of a logger through once per interval, with the number of those held back.

    The texts are constants of the code, so the table of them is bounded.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the line may be written."""
        if getattr(record, "told_once", False):
            return True
        key = (record.name, str(record.msg))
        now_ns = self._clock.monotonic_ns()
        last_ns, held_back = self._seen.get(key, (0, 0))
        if key in self._seen and now_ns - last_ns < INTERVAL_S * 1e9:
            self._seen[key] = (last_ns, held_back + 1)
            return False
        self._seen[key] = (now_ns, 0)
        if held_back:
            record.msg = f"{record.msg} ({held_back} more like this held back)"
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for who collects logs by machine."""

    def format(self, record: logging.LogRecord) -> str:
        """RFC 3339 time in UTC, level, logger, message; the traceback where there is one."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_log_format(name: Literal["text", "json"]) -> None:
    """Lines for people, or for machines."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if name == "json" else logging.Formatter(FORMAT))


def set_log_level(level: str) -> None:
    """How much is said; from any thread."""
    logging.getLogger().setLevel(level.upper())


def configure_logs(clock: Clock) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(OncePerInterval(clock))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
