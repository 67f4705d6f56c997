"""The asyncio loop in which all I/O of the process happens, seen from other threads.

``tracefit run`` hands in the loop of its main thread, where signals arrive. Who embeds a part without a loop (a test, a
command that is no service) gets one with a thread of its own, from the first coroutine to ``close``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from .tasks import Health, Part

T = TypeVar("T")

_log = logging.getLogger(__name__)


class IoLoop:
    """Runs coroutines for threads that are not the loop's.

    Args:
        loop: a loop that somebody else runs; None begins an own one when it is needed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for what it returns or raises."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="io", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End an own loop, and what still runs in it; that of somebody else goes on."""
        if self._thread is not None and self._loop is not None:
            self.run(_end_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None


async def _end_others() -> None:
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_own_thread(work: Callable[[], T]) -> T:
    """Do what may hang: in a thread that ends with the process, and holds none of the loop's few threads."""
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
    """A coroutine that runs in the loop from ``start`` to ``stop``.

    Args:
        name: in the log and in health, if the coroutine raises.
        health: what makes the process not alive then; None if nobody depends on it.
        io: the loop.
    """

    def __init__(self, name: str, health: Health | None, io: IoLoop) -> None:
        self._name = name
        self._health = health
        self._io = io
        self._task: asyncio.Task[None] | None = None

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin; returns at once."""

        async def begin() -> None:
            self._task = asyncio.create_task(coroutine, name=self._name)
            self._task.add_done_callback(self._tell)

        self._io.run(begin())

    def stop(self) -> None:
        """Cancel it and wait for its end, also if it never started."""
        if self._task is not None:
            self._io.run(end_tasks([self._task]))

    def _tell(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("%s died", self._name, exc_info=error)
            if self._health is not None:
                self._health.fail(self._name)


_SIGNALS = signal.SIGTERM, signal.SIGINT


async def serve(make: Callable[[IoLoop, Callable[[], None]], Part]) -> bool:
    """Run a service in this loop until SIGTERM, SIGINT, or its own call of ``stop``; a second signal ends the process.

    Args:
        make: makes it of the loop, and of what asks for the stop from any thread. It is called in a thread, as are its
            ``start`` and ``stop``, for they wait for the loop.

    Returns:
        What its ``stop`` says.
    """
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    def ask_stop() -> None:
        loop.call_soon_threadsafe(asked.set)

    def on_signal() -> None:
        asked.set()
        for number in _SIGNALS:
            loop.add_signal_handler(number, os._exit, 128 + number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    service = await asyncio.to_thread(make, IoLoop(loop), ask_stop)
    await asyncio.to_thread(service.start)
    await asked.wait()
    return await asyncio.to_thread(service.stop)
