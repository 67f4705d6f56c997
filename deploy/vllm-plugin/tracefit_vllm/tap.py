"""The tap on one scheduler: what its methods did is put on the publisher's queue.

Three rules. vLLM's own call comes first or its result last: whatever happens here, the engine gets what it would have
got. Nothing blocks: the queue is bounded, and full means dropped and counted. Every hook is guarded, and after
``ERRORS_MAX`` errors none does anything any more, with one line in the log.

    schedule()            entry = ts_start, return = ts_end     the batch is summed up and waits
    update_from_output()  entry = ts_output, return = ts_done   it leaves with both; first tokens, ends

Under asynchronous scheduling the next batch is scheduled before the output of one comes, so several wait.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from .publisher import Publisher, Step
from .settings import LOG, SettingError, dig, read_settings

if TYPE_CHECKING:
    from .otlp import Journeys
    from .publisher import Wire

ERRORS_MAX: Final = 5
IN_FLIGHT_MAX: Final = 64
"""Batches scheduled and not yet answered; vLLM has as many as pipeline stages, plus one."""


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Let no error of ours reach the engine."""

    @functools.wraps(hook)
    def call(tap: Tap | None, *args: Any) -> None:
        if tap is not None and tap.is_on:
            try:
                hook(tap, *args)
            except Exception:  # noqa: BLE001 the engine must not see our errors
                tap.failed(hook.__name__)

    return call


class Tap:
    """Watches one scheduler, on the engine's thread.

    Args:
        scheduler: vLLM's.
        wire: how steps are told.
        journeys: where requests are told, too.
    """

    def __init__(self, scheduler: Any, wire: Wire, journeys: Journeys | None = None) -> None:
        self.is_on = True
        self._scheduler = scheduler
        self._wire = wire
        self.publisher = Publisher(wire)
        self._journeys = journeys
        self._pending: deque[tuple[Any, Step]] = deque(maxlen=IN_FLIGHT_MAX)
        self._step = 0
        self._errors = 0

    @_guarded
    def scheduled(self, output: Any, start_ns: int) -> None:
        """``schedule()`` was called at this time and has returned this."""
        end_ns = time.monotonic_ns()
        unix_ns = time.time_ns()
        self._step += 1
        batch = self._wire.batch(output)
        if self._journeys is not None:
            self._journeys.scheduled(output, self._step, end_ns)
        self._pending.append((output, Step(self._step, start_ns, end_ns, unix_ns, batch)))

    @_guarded
    def updated(self, output: Any, output_ns: int) -> None:
        """``update_from_output()`` was called with this at this time and has returned."""
        done_ns = time.monotonic_ns()
        pending = self._pending
        if not any(waits is output for waits, _ in pending):
            return  # scheduled before the tap was there, or pushed out
        while pending[0][0] is not output:
            pending.popleft()  # whose output never came
        step = pending.popleft()[1]
        row = self._wire.row(step._replace(output_ns=output_ns, done_ns=done_ns))
        if row is not None:
            self.publisher.offer(row)
        self._close_journeys(step.number, done_ns)

    @_guarded
    def request_added(self, request: Any) -> None:
        """``add_request()`` has returned."""
        if self._journeys is not None:
            self._journeys.queued(request, self._step, time.monotonic_ns())

    @_guarded
    def requests_finished(self) -> None:
        """``finish_requests()`` has returned."""
        self._close_journeys(self._step, time.monotonic_ns())

    @_guarded
    def stop(self) -> None:
        """The engine stops: what is queued is sent."""
        self.publisher.stop()

    def failed(self, where: str) -> None:
        """Count an error inside a hook; called from an except block."""
        self._errors += 1
        self.publisher.lost["hook_error"] += 1
        LOG.debug("tracefit: error in %s", where, exc_info=True)
        if self._errors >= ERRORS_MAX:
            LOG.warning("tracefit: off after %d errors, the last in %s", self._errors, where, exc_info=True)
            self.is_on = False
            self._pending.clear()
            self._journeys = None
            self.publisher.stop(wait_s=0)  # without waiting: this is the engine's thread

    def _close_journeys(self, step: int, ts_ns: int) -> None:
        if self._journeys is not None and (freed := self._scheduler.finished_req_ids):
            for span in self._journeys.finished(freed, step, ts_ns):
                self.publisher.offer(span)


def watch(scheduler: Any) -> Tap | None:
    """Return what watches a scheduler that vLLM has just made; None, with a line in the log, where nothing can."""
    try:
        settings = read_settings(os.environ)
        if settings.endpoint.startswith("tcp:"):
            from .fpm import ForwardPasses  # noqa: PLC0415 only the packages that are needed

            tap = Tap(scheduler, ForwardPasses(scheduler, settings))
        else:
            from .otlp import Journeys, Spans  # noqa: PLC0415

            # The instrumented fork sends the same journeys itself; twice would be two requests.
            theirs = dig(scheduler, "vllm_config.observability_config.enable_journey_tracing")
            journeys = None if theirs else Journeys()
            tap = Tap(scheduler, Spans(scheduler, settings, journeys), journeys)
        # atexit does not run in multiprocessing's children (the engine core is one); its finalizers do.
        multiprocessing.util.Finalize(None, tap.publisher.stop, exitpriority=10)
    except SettingError as error:
        LOG.warning("tracefit: off, %s", error)
    except Exception:  # noqa: BLE001 serving goes on without telemetry
        LOG.warning("tracefit: off, could not be attached", exc_info=True)
    else:
        LOG.info("tracefit: steps to %s", settings.endpoint)
        return tap
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
            Tap.scheduled(self._tracefit, output, start_ns)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output_ns = time.monotonic_ns()
            result = super().update_from_output(scheduler_output, *args, **kwargs)
            Tap.updated(self._tracefit, scheduler_output, output_ns)
            return result

        def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().add_request(request, *args, **kwargs)
            Tap.request_added(self._tracefit, request)
            return result

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            result = super().finish_requests(*args, **kwargs)
            Tap.requests_finished(self._tracefit)
            return result

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            Tap.stop(self._tracefit)
            return super().shutdown(*args, **kwargs)

    Traced.__name__ = Traced.__qualname__ = f"Traced{base.__name__}"
    return Traced


def hook() -> None:
    """From now on, watch whatever scheduler class vLLM chooses in this process; never raises."""
    try:
        from vllm.config import SchedulerConfig  # type: ignore[import-not-found]  # noqa: PLC0415

        choose = SchedulerConfig.get_scheduler_cls

        @functools.wraps(choose)
        def get_scheduler_cls(config: Any) -> Any:
            return traced(choose(config))

        SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    except Exception:  # noqa: BLE001 an exception here would keep vLLM from starting
        LOG.warning("tracefit: off, could not be installed", exc_info=True)
