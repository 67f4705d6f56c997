"""What a person sees: log lines, what a command prints, and how far it is.

The log has a line per change of state, and the same complaint at most every ten seconds. Whatever happens per item is a
counter: a line about it would fill the disk when it is needed least.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never

from .tasks import Clock

if TYPE_CHECKING:
    from tqdm import tqdm

INTERVAL_S = 10.0
REPORT_ONCE = {"report_once": True}
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
        if getattr(record, "report_once", False):
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


def set_log_level(level: str) -> None:
    """How much is said; from any thread."""
    logging.getLogger().setLevel(level.upper())


def configure_logs(clock: Clock) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler()
    handler.addFilter(OncePerInterval(clock))
    logging.basicConfig(handlers=[handler], format=FORMAT, level=logging.INFO)


PrintLine = Callable[[str], None]
"""Takes one line for people, as ``print_stderr`` does."""


def print_stdout(text: str) -> None:
    """Print one line of a result on standard output."""
    print(text, flush=True)


def print_stderr(text: str) -> None:
    """Print one line on standard error, above the bar if one is drawn there."""
    from tqdm import tqdm  # noqa: PLC0415 -- 20 ms of imports that only a long command pays

    if sys.stderr is not None:  # closed by whoever started us
        tqdm.write(text, file=sys.stderr)


@contextmanager
def progress(doing: str, total: float, unit: str = "B") -> Iterator[tqdm[Never]]:
    """A bar of tqdm on standard error while the context lasts; log lines stand above it.

    Only a terminal gets one: in a file, or a pipe, a bar would be a thousand lines. A ``total`` of 0 is unknown;
    ``unit`` is ``B`` for bytes, else a word.
    """
    from tqdm import tqdm  # noqa: PLC0415 -- as above
    from tqdm.contrib.logging import logging_redirect_tqdm  # noqa: PLC0415

    hidden = True if sys.stderr is None else None  # None: tqdm asks whether it is a terminal
    look: dict[str, Any] = {"unit": f" {unit}", "unit_scale": unit == "B", "leave": False, "file": sys.stderr}
    with tqdm(desc=doing, total=total or None, disable=hidden, **look) as bar, logging_redirect_tqdm():
        yield bar
