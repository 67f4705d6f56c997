"""What runs in the loop beside others: whoever dies there is told."""

import asyncio

import pytest

from collector.runtime import Background, Health
from tests.support.clocks import FakeClock


async def fail():
    raise ValueError("a fault of ours")


@pytest.mark.parametrize("faulty", [False, True])
def test_a_coroutine_that_raises_makes_the_process_not_alive_and_is_in_the_log_and_one_that_is_stopped_does_not(
    faulty, caplog
):
    async def run():
        background.start(fail() if faulty else asyncio.sleep(3600))
        await asyncio.sleep(0.01)
        await background.stop()

    health = Health(FakeClock())
    background = Background("scraper", health)
    asyncio.run(run())
    assert health.late() == (("scraper",) if faulty else ())
    assert ("scraper died" in caplog.text) == ("a fault of ours" in caplog.text) == faulty
