"""The tap on one scheduler: what its methods did is put on the publisher's queue.

Three rules. vLLM's own call comes first or its result last: whatever happens here, the engine gets what it would have
got. Nothing blocks: the queue is bounded, and full means dropped and counted. Every hook is guarded, and after
``ERRORS_MAX`` errors none does anything any more, with one line in the log.

    schedule()            entry = ts_start, return = ts_end     the batch is summed up and waits
    update_from_output()  entry = ts_output, return = ts_done   it leaves with both

Under asynchronous scheduling the next batch is scheduled before the output of one comes, so several wait.
"""

from __future__ import annotations

import multiprocessing.util
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .publisher import Publisher, Step
from .settings import LOG, SettingError, read_settings

if TYPE_CHECKING:
    from .publisher import Wire

ERRORS_MAX: Final = 5
IN_FLIGHT_MAX: Final = 64
"""Batches scheduled and not yet answered; vLLM has as many as pipeline stages, plus one."""


def guarded(tap: Tap | None, hook: Callable[..., None], *args: Any) -> None:
    """Call a hook of a tap that is there and on; no error of ours reaches the engine."""
    if tap is not None and tap.is_on:
        try:
            hook(tap, *args)
        except Exception:  # noqa: BLE001 the engine must not see our errors
            tap.failed(hook.__name__)


class Tap:
    """Watches a scheduler of vLLM's, on the engine's thread, and tells its steps over a wire."""

    def __init__(self, scheduler: Any, wire: Wire) -> None:
        self.is_on = True
        self._scheduler = scheduler
        self._wire = wire
        self.publisher = Publisher(wire)
        self._in_flight: dict[int, tuple[Any, int, int, int, tuple[int, ...]]] = {}
        self._step = self._done_ns = self._errors = 0
        self._busy = False

    def scheduled(self, output: Any, start_ns: int) -> None:
        """``schedule()`` was called at this time and has returned this."""
        end_ns = time.monotonic_ns()
        self._step += 1
        if len(self._in_flight) == IN_FLIGHT_MAX:
            del self._in_flight[next(iter(self._in_flight))]  # whose output never came
        self._in_flight[id(output)] = output, self._step, start_ns, end_ns, self._wire.batch(output)

    def updated(self, output: Any, output_ns: int) -> None:
        """``update_from_output()`` was called with this at this time and has returned."""
        done_ns = time.monotonic_ns()
        free_ns, self._done_ns, was_busy = self._done_ns, done_ns, self._busy
        self._busy = bool(output.num_scheduled_tokens) and any(self._scheduler.get_request_counts())
        told = self._in_flight.pop(id(output), None)
        if told is None:
            return  # it could not be summed up, or was pushed out
        _, number, start_ns, end_ns, batch = told
        since_ns = free_ns if was_busy else max(start_ns, free_ns)
        self.publisher.enqueue(Step(number, start_ns, end_ns, output_ns, done_ns, batch, since_ns))

    def failed(self, where: str) -> None:
        """Count an error inside a hook; called from an except block."""
        self.publisher.lost += 1
        self._errors += 1
        LOG.debug("tracefit: error in %s", where, exc_info=True)
        if self._errors >= ERRORS_MAX:
            LOG.warning("tracefit: off after %d errors, the last in %s", ERRORS_MAX, where, exc_info=True)
            self.is_on = False
            self._in_flight.clear()
            self.publisher.stop(wait_s=0)  # without waiting: this is the engine's thread


def watch(scheduler: Any) -> Tap | None:
    """Return what watches a scheduler that vLLM has just made; None, with a line in the log, where nothing can."""
    try:
        settings = read_settings(os.environ)
        wire: Wire
        if settings.endpoint.startswith("tcp:"):
            from .fpm import ForwardPasses  # noqa: PLC0415 only the packages that are needed

            wire = ForwardPasses(scheduler, settings)
        else:
            from .otlp import Spans  # noqa: PLC0415

            wire = Spans(scheduler, settings)
        tap = Tap(scheduler, wire)
        # atexit does not run in multiprocessing's children (the engine core is one); its finalizers do.
        multiprocessing.util.Finalize(None, tap.publisher.stop, exitpriority=10)
        LOG.info("tracefit: steps to %s", wire.address)
        return tap  # noqa: TRY300
    except SettingError as error:
        LOG.warning("tracefit: off, %s", error)
    except Exception:  # noqa: BLE001 serving goes on without telemetry
        LOG.warning("tracefit: off, could not be attached", exc_info=True)
    return None


def traced(base: Any) -> Any:
    """Return a subclass of one of vLLM's scheduler classes that is watched; a watched one as it is."""
    if hasattr(base, "_tracefit"):
        return base

    class Traced(base):  # type: ignore[misc]
        _tracefit: Tap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._tracefit = watch(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            output = super().schedule(*args, **kwargs)
            guarded(self._tracefit, Tap.scheduled, output, start_ns)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output_ns = time.monotonic_ns()
            result = super().update_from_output(scheduler_output, *args, **kwargs)
            guarded(self._tracefit, Tap.updated, scheduler_output, output_ns)
            return result

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            guarded(self._tracefit, lambda tap: tap.publisher.stop())
            return super().shutdown(*args, **kwargs)

    Traced.__name__ = Traced.__qualname__ = f"Traced{base.__name__}"
    return Traced


def hook() -> None:
    """From now on, watch whatever scheduler class vLLM chooses in this process; never raises."""
    try:
        from vllm.config import SchedulerConfig  # type: ignore[import-not-found]  # noqa: PLC0415

        choose = SchedulerConfig.get_scheduler_cls
        SchedulerConfig.get_scheduler_cls = lambda config: traced(choose(config))
    except Exception:  # noqa: BLE001 an exception here would keep vLLM from starting
        LOG.warning("tracefit: off, could not be installed", exc_info=True)
