"""The commands, each imported when it runs, and the report that those give which answer a question."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from collector.runtime import EXIT_OK


class Report(NamedTuple):
    """What a command says: lines for eyes, the same as a document of plain values, and notes for standard error."""

    code: int = EXIT_OK
    lines: Iterable[str] = ()
    document: object = None
    notes: Iterable[str] = ()


__all__ = ["Report"]
