"""What runs in the asyncio loop in which all I/O of the process happens: that of the main thread, with its signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from .tasks import Health, Part

T = TypeVar("T")

_log = logging.getLogger(__name__)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(work: Callable[[], T]) -> T:
    """Run a call that may hang in a daemon thread, so that it takes none of the loop's few threads."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it goes on if the caller gives up

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 -- the caller gets it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


class Background:
    """A coroutine that runs in the loop from ``start`` to ``stop``; if it raises, the process is not alive any more.

    ``health`` is None where nobody depends on it.
    """

    def __init__(self, name: str, health: Health | None) -> None:
        self._name = name
        self._health = health
        self._task: asyncio.Task[None] | None = None

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin; returns at once."""
        self._task = asyncio.create_task(coroutine, name=self._name)
        self._task.add_done_callback(self._tell)

    async def stop(self) -> None:
        """Cancel it and wait for its end, also if it never started."""
        if self._task is not None:
            await end_tasks([self._task])

    def _tell(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("%s died", self._name, exc_info=error)
            if self._health is not None:
                self._health.fail(self._name)


_SIGNALS = signal.SIGTERM, signal.SIGINT
AGAIN_S = 0.5
"""A second signal counts only after this long: a wrapper may repeat the first one at once."""


async def serve(make: Callable[[Callable[[], None]], Part]) -> bool:
    """Run a service in this loop until SIGTERM, SIGINT, or its own call of ``stop``; a later one ends the process.

    ``make`` makes it of what asks for the stop from any thread. Returns what its ``stop`` says.
    """
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def ask_stop() -> None:
        loop.call_soon_threadsafe(asked.set)

    def on_signal() -> None:
        asked.set()
        loop.call_later(AGAIN_S, end_at_the_next)

    def end_at_the_next() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, os._exit, 128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    service = make(ask_stop)
    await service.start()
    await asked.wait()
    return await service.stop()


@contextmanager
def running(part: Part) -> Iterator[Callable[[], bool]]:
    """Run a part in a loop with a thread of its own, for who has no loop, until the end of the block.

    Yields what stops it before, and says what its ``stop`` did.
    """
    started: Future[Any] = Future()

    async def run() -> bool:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        await part.start()
        started.set_result(lambda: loop.call_soon_threadsafe(asked.set))
        await asked.wait()
        return await part.stop()

    def stop() -> bool:
        if not ended.done():
            started.result()()
        return ended.result()

    with ThreadPoolExecutor(1, "io") as pool:
        ended = pool.submit(lambda: asyncio.run(run()))
        wait((started, ended), return_when=FIRST_COMPLETED)
        try:
            if started.done():
                yield stop
        finally:
            stop()
