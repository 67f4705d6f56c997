"""What goes wrong, one sentence each, and the check of every number that a caller hands in."""

from __future__ import annotations

import math

TOKENS_MAX = 1e9
"""More tokens than this in one step or request is a mistake, not a question."""

FINITE_MAX = 1e30
"""No number of a snapshot is larger, so that no sum or product of them is infinite."""

REQUESTS_MAX = 1e6
"""The same for requests."""


_TEXT_CHARS_MAX, _SHOWN_CHARS = 1000, 32


def printable(text: str) -> str:
    """On one line, without what a terminal would obey, and bounded: servers and documents may say anything."""
    return "".join(each if each.isprintable() else " " for each in text[:_TEXT_CHARS_MAX]).strip()


class TracefitError(Exception):
    """Everything this package raises on purpose; its text is one sentence for the user."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class LoadError(TracefitError):
    """The snapshot cannot be had: no file, no answer, too slow, too big, or not a snapshot."""


class NotFoundError(TracefitError):
    """No configuration of the snapshot, or more than one (``several``), is what was asked for."""

    def __init__(self, text: str, *, several: bool) -> None:
        super().__init__(text)
        self.several = several


class NoCoefficientsError(TracefitError):
    """The configuration has nothing to predict with; the text says which and why."""


class BadInputError(TracefitError, ValueError):
    """A number that makes no sense; ``parameter`` names it, ``problem`` says what is the matter."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


def checked(parameter: str, value: object, low: float, high: float) -> float:
    """The number itself, if it lies between the bounds; a scalar of numpy or decimal as a plain one.

    Raises:
        BadInputError: it is no number, not finite, or outside.
    """
    try:
        number = float(value) if not isinstance(value, (str, bool)) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:  # false for NaN too
        raise BadInputError(parameter, f"expected {low:g} to {high:g}, got {str(value)[:_SHOWN_CHARS]}")
    return value if type(value) is int else number
