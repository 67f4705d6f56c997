"""What runs in the loop beside others: whoever dies there is told."""

import asyncio
import gc

import pytest

from collector.runtime import Background, Health, IoLoop
from tests.support.clocks import FakeClock, eventually


async def fail():
    raise ValueError("a fault of ours")


@pytest.mark.parametrize("faulty", [False, True])
def test_a_coroutine_that_raises_makes_the_process_not_alive_and_is_in_the_log_and_one_that_is_stopped_does_not(
    faulty, caplog
):
    health = Health(FakeClock())
    background = Background("scraper", health)
    background.start(fail() if faulty else asyncio.sleep(3600))
    eventually(lambda: health.late() == (("scraper",) if faulty else ()))
    background.stop()
    assert health.alive() is not faulty
    assert ("scraper died" in caplog.text) == ("a fault of ours" in caplog.text) == faulty


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
