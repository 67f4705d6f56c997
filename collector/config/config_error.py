"""Bad configuration: the one error that names a key, and the word that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NOT_ONE_OF = re.compile(r"'(?P<word>[^']+)'.* is not one of (?P<known>[^;]+)$")


class ConfigError(Exception):
    """Bad configuration: ``key`` is the dotted path, the environment variable or the option at fault.

    A ``problem`` that reads "'x' is not one of a, b" is completed by the nearest of those.
    """

    def __init__(self, key: str, problem: str) -> None:
        choice = _NOT_ONE_OF.search(problem)
        if choice is not None:
            problem += suggestion(choice["word"], choice["known"].split(", "))
        super().__init__(f"{'usage' if key.startswith('--') else 'config'} error: {key}: {problem}")
        self.key = key
        self.problem = problem


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest of some words, empty if none is near."""
    import difflib  # noqa: PLC0415 -- needed by who is wrong only

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
