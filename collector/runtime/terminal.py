"""How a command writes: through an argument, so that it knows no stream and tests read what it says."""

from __future__ import annotations

from collections.abc import Callable

PrintLine = Callable[[str], None]
"""Prints one line: results (``say``) on standard output, remarks (``note``) on standard error."""
