"""What runs in the loop beside others: whoever dies there is told."""

from __future__ import annotations

import asyncio
import gc

import pytest

from collector.runtime import Background, Health, IoLoop
from tests.support.clocks import FakeClock, eventually


@pytest.fixture
def io():
    loop = IoLoop()
    yield loop
    loop.close()


def test_a_coroutine_that_raises_makes_the_process_not_alive_and_is_in_the_log(io, caplog):
    health = Health(FakeClock())

    async def fail():
        raise ValueError("a fault of ours")

    background = Background("scraper", health, io)
    background.start(fail())
    eventually(lambda: health.late() == ("scraper",))
    assert "scraper died" in caplog.text
    assert "a fault of ours" in caplog.text
    background.stop()
    assert not health.alive()


def test_a_coroutine_that_is_stopped_is_no_fault(io, caplog):
    health = Health(FakeClock())
    background = Background("scraper", health, io)
    background.start(asyncio.sleep(3600))
    background.stop()
    assert health.alive()
    assert not caplog.text


def test_what_still_runs_when_an_own_loop_is_closed_is_ended(caplog):
    loop, ended = IoLoop(), []

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def leave_behind():
        ended.append(asyncio.get_running_loop().create_task(forever()))
        await asyncio.sleep(0)

    loop.run(leave_behind())
    loop.close()
    gc.collect()
    assert ended[1:] == [True]
    assert "Task was destroyed" not in caplog.text
