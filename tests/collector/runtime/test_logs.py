"""The same complaint at most every ten seconds; lines for people, or for machines."""

import io
import json
import logging
from datetime import datetime

import pytest

from collector.runtime.terminal import INTERVAL_S, JsonFormatter, OncePerInterval
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


def test_a_line_for_machines_is_one_object_with_the_traceback_inside():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("a.name")
    logger.addHandler(handler)
    logger.warning("%s of %d\nlines", "two", 2)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("caught")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("warning", "a.name", "two of 2\nlines")
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "ValueError: broken" in second["traceback"]
