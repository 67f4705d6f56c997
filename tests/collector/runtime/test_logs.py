"""The same complaint at most every ten seconds."""

from __future__ import annotations

import logging

import pytest

from collector.runtime.logs import INTERVAL_S, OncePerInterval
from tests.support.clocks import FakeClock


@pytest.fixture
def said():
    """A logger's lines, and its clock."""
    clock, lines = FakeClock(), []
    handler = logging.Handler()
    handler.addFilter(OncePerInterval(clock))
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, clock, lines


def test_a_repeated_line_is_held_back_and_counted(said):
    logger, clock, lines = said
    for size_bytes in range(5):
        logger.warning("queue of %d bytes", size_bytes)
    assert lines == ["queue of 0 bytes"]
    clock.advance(INTERVAL_S)
    logger.warning("queue of %d bytes", 9)
    assert lines[1:] == ["queue of 9 bytes (4 more like this held back)"]


def test_different_lines_do_not_hold_each_other_back(said):
    logger, _, lines = said
    logger.warning("one")
    logger.warning("two")
    assert lines == ["one", "two"]
