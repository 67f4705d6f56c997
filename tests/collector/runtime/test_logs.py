"""The same complaint at most every ten seconds."""

import logging

import pytest

from collector.runtime.terminal import INTERVAL_S, OncePerInterval
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


def test_a_repeated_line_is_held_back_and_counted_and_holds_no_other_back(said):
    logger, clock, lines = said
    for size_bytes in range(5):
        logger.warning("queue of %d bytes", size_bytes)
    logger.warning("another")
    assert lines == ["queue of 0 bytes", "another"]
    clock.advance(INTERVAL_S)
    logger.warning("queue of %d bytes", 9)
    assert lines[2:] == ["queue of 9 bytes (4 more like this held back)"]
