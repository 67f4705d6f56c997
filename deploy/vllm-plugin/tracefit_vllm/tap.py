"""The tap on one scheduler instance: its methods are wrapped, what they did is put on the exporter's queue.

Four rules. vLLM's own call comes first or its result last: whatever happens here, the engine gets what it would have
got. Nothing blocks: the queue is bounded and full means dropped and counted. Every hook is guarded, and after
``ERRORS_MAX`` errors all of them are taken off, with one line in the log. Work is done per batch, not per request,
wherever vLLM's own lists allow it.

    schedule()            entry = ts_start, return = ts_end     the batch is summed up, the row waits
    update_from_output()  entry = ts_output, return = ts_done   the row leaves with both; first tokens, ends
"""

from __future__ import annotations

import multiprocessing.util
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .batch import REQUIRED_OUTPUT, snapshots, summarise
from .exporter import Exporter, Sink
from .facts import dig, resource_attributes
from .items import KvBatch, SnapshotRows, StepRow
from .journeys import Finished, Journeys
from .kv import plain
from .log import LOG
from .sampling import BlockSampler
from .settings import Settings

ERRORS_MAX: Final = 5
IN_FLIGHT_MAX: Final = 64
"""Batches scheduled and not yet answered; vLLM has as many as pipeline stages, plus one."""

REQUIRED: Final = (
    "schedule",
    "update_from_output",
    "requests",
    "running",
    "waiting",
    "kv_cache_manager.block_pool.num_gpu_blocks",
    "kv_cache_manager.block_pool.get_num_free_blocks",
)
REQUIRED_JOURNEYS: Final = ("add_request", "finish_requests", "finished_req_ids")

Call = Callable[..., Any]


class Pending(NamedTuple):
    """A batch between ``schedule()`` and ``update_from_output()``; without a row if its step is not sampled."""

    output: Any
    step: int
    unix_ns: int
    row: tuple[int, ...] | None
    hook_ns: int


class Tap:
    """Watches one scheduler. Runs on the engine's thread only, but for the exporter's queue."""

    def __init__(self, scheduler: Any, settings: Settings, sink: Sink, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._sink = sink
        self._rng = rng
        self._sampler = BlockSampler(settings.step_sample, rng)
        self._journeys: Journeys | None = None
        self._prefilling: dict[str, Any] = {}
        self._pending: deque[Pending] = deque()
        self._originals: dict[str, tuple[Any, Any]] = {}
        self._wall_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        self._kv_sequence = 0
        self._shape_known = False
        self._active = False
        self.step = 0
        self.errors = 0

    def attach(self) -> bool:
        """Wrap the instance's methods; tell what is missing and do nothing if one of them is."""
        missing = [path for path in REQUIRED if dig(self._scheduler, path) is None]
        if missing:
            LOG.warning("tracefit: off, this vLLM's scheduler has no %s", ", ".join(missing))
            return False
        wrap = {"schedule": self._schedule, "update_from_output": self._update, "shutdown": self._shutdown}
        if self._settings.journeys and self._may_follow_requests():
            self._journeys = Journeys()
            wrap |= {"add_request": self._add_request, "finish_requests": self._finish_requests}
        for name, make in wrap.items():
            self._wrap(self._scheduler, name, make)
        publisher = getattr(self._scheduler, "kv_event_publisher", None)
        # vLLM's null publisher means that the engine records no events; wrapping it would be idle work.
        if self._settings.kv_events and publisher is not None and "Null" not in type(publisher).__name__:
            self._wrap(publisher, "publish", self._publish, key="kv_event_publisher.publish")
        self._active = True
        return True

    def _may_follow_requests(self) -> bool:
        missing = [path for path in REQUIRED_JOURNEYS if dig(self._scheduler, path) is None]
        if missing:
            LOG.warning("tracefit: steps only, this vLLM's scheduler has no %s", ", ".join(missing))
        # The instrumented fork sends the same journeys itself; twice would be two requests.
        theirs = dig(self._scheduler, "vllm_config.observability_config.enable_journey_tracing")
        return not missing and not theirs

    def _wrap(self, owner: Any, name: str, make: Callable[[Call], Call], key: str = "") -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        hook = make(original)
        setattr(owner, name, hook)
        self._originals[key or name] = (owner, hook)

    def _failed(self, where: str) -> None:
        """Count an error inside a hook; called from an except block."""
        self.errors += 1
        self._sink.count("hook_error")
        LOG.debug("tracefit: error in %s", where, exc_info=True)
        if self.errors >= ERRORS_MAX:
            LOG.warning("tracefit: unhooked after %d errors, the last in %s", self.errors, where, exc_info=True)
            self.detach()

    def detach(self) -> None:
        """Take the hooks off; one that something else has wrapped since stays, as a mere pass-through."""
        self._active = False
        for key, (owner, hook) in self._originals.items():
            name = key.rpartition(".")[2]
            if vars(owner).get(name) is hook:
                delattr(owner, name)
        self._originals.clear()
        self._pending.clear()
        self._prefilling.clear()
        self._journeys = None
        self._sink.stop(wait_s=0)  # without waiting: this is the engine's thread

    # The wrappers: vLLM's call outside of the guard, ours inside.

    def _schedule(self, original: Call) -> Call:
        def schedule(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.monotonic_ns()
            output = original(*args, **kwargs)
            if self._active:
                end_ns = time.monotonic_ns()
                try:
                    self._on_schedule(output, start_ns, end_ns)
                except Exception:  # noqa: BLE001 the engine must not see our errors
                    self._failed("schedule")
            return output

        return schedule

    def _update(self, original: Call) -> Call:
        def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output_ns = time.monotonic_ns()
            result = original(scheduler_output, *args, **kwargs)
            if self._active:
                done_ns = time.monotonic_ns()
                try:
                    self._on_update(scheduler_output, output_ns, done_ns)
                except Exception:  # noqa: BLE001
                    self._failed("update_from_output")
            return result

        return update_from_output

    def _add_request(self, original: Call) -> Call:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, *args, **kwargs)
            journeys = self._journeys
            if journeys is not None:
                try:
                    if not journeys.queued(request, self.step, time.monotonic_ns()):
                        self._sink.count("open_requests")
                except Exception:  # noqa: BLE001
                    self._failed("add_request")
            return result

        return add_request

    def _finish_requests(self, original: Call) -> Call:
        def finish_requests(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._journeys is not None:
                try:
                    self._close_journeys(self.step, time.monotonic_ns())
                except Exception:  # noqa: BLE001
                    self._failed("finish_requests")
            return result

        return finish_requests

    def _publish(self, original: Call) -> Call:
        def publish(batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(batch, *args, **kwargs)
            if self._active:
                sequence, self._kv_sequence = self._kv_sequence, self._kv_sequence + 1
                try:
                    step = self._pending[0].step if self._pending else self.step
                    rank = getattr(batch, "data_parallel_rank", None) or 0
                    events = [plain(event) for event in batch.events]
                    self._sink.offer(KvBatch(int(batch.ts * 1e9), step, rank, sequence, events))
                except Exception:  # noqa: BLE001
                    self._failed("publish")
            return result

        return publish

    def _shutdown(self, original: Call) -> Call:
        def shutdown(*args: Any, **kwargs: Any) -> Any:
            self._sink.stop()
            return original(*args, **kwargs)

        return shutdown

    # What the hooks do.

    def _on_schedule(self, output: Any, start_ns: int, end_ns: int) -> None:
        if not self._shape_known and not self._learn_shape(output):
            return
        unix_ns = time.time_ns()
        self._wall_minus_mono_ns = unix_ns - end_ns
        self.step += 1
        self._note_prefills(output)
        row = None
        if self._sampler.keeps(self.step):
            batch = summarise(output, self._scheduler, self._prefilling)
            row = (self.step, start_ns, end_ns, (end_ns - start_ns) // 1000, *batch)
            if self._settings.snapshot_sample and self._rng.random() < self._settings.snapshot_sample:
                self._sink.offer(SnapshotRows(self.step, unix_ns, snapshots(output, self._scheduler)))
        if self._journeys is not None:
            self._journeys.scheduled(output, self.step, end_ns)
        if len(self._pending) >= IN_FLIGHT_MAX:
            self._leave(self._pending.popleft(), 0, 0)
        self._pending.append(Pending(output, self.step, unix_ns, row, time.monotonic_ns() - end_ns))

    def _learn_shape(self, output: Any) -> bool:
        missing = [path for path in REQUIRED_OUTPUT if dig(output, path) is None]
        if missing:
            LOG.warning("tracefit: off, this vLLM's SchedulerOutput has no %s", ", ".join(missing))
            self.detach()
            return False
        self._shape_known = True
        return True

    def _note_prefills(self, output: Any) -> None:
        """Keep the set of requests that have been scheduled and have no output token yet."""
        prefilling = self._prefilling
        for request_id in output.finished_req_ids:
            prefilling.pop(request_id, None)
        if output.scheduled_new_reqs:
            by_id = self._scheduler.requests
            for new in output.scheduled_new_reqs:
                request = by_id[new.req_id]
                if not request.num_output_tokens:
                    prefilling[new.req_id] = request

    def _on_update(self, output: Any, output_ns: int, done_ns: int) -> None:
        pending = self._pending
        if not pending:
            return  # scheduled before the tap was attached
        if pending[0].output is not output and not any(entry.output is output for entry in pending):
            return  # pushed out
        while pending[0].output is not output:
            self._leave(pending.popleft(), 0, 0)
        entry = pending.popleft()
        if self._prefilling:
            self._look_for_first_tokens(entry.step, done_ns)
        if self._journeys is not None:
            self._close_journeys(entry.step, done_ns)
        self._leave(entry, output_ns, done_ns)

    def _look_for_first_tokens(self, step: int, ts_ns: int) -> None:
        journeys = self._journeys
        begun = []
        for request_id, request in self._prefilling.items():
            if request.num_output_tokens:
                begun.append(request_id)
            elif journeys is not None:
                journeys.computed(request_id)
        for request_id in begun:
            del self._prefilling[request_id]
            if journeys is not None:
                journeys.first_token(request_id, step, ts_ns)

    def _close_journeys(self, step: int, ts_ns: int) -> None:
        freed = self._scheduler.finished_req_ids
        if freed and self._journeys is not None:
            finished: list[Finished] = self._journeys.finished(freed, step, ts_ns, self._wall_minus_mono_ns)
            for journey in finished:
                self._sink.offer(journey)

    def _leave(self, entry: Pending, output_ns: int, done_ns: int) -> None:
        if entry.row is not None:
            hook_ns = entry.hook_ns + (time.monotonic_ns() - done_ns if done_ns else 0)
            self._sink.offer(StepRow(entry.unix_ns, done_ns, (*entry.row, hook_ns, output_ns, done_ns)))


def attach(scheduler: Any, settings: Settings) -> Tap | None:
    """Tap a scheduler that vLLM has just made."""
    exporter = Exporter(settings, resource_attributes(scheduler, settings))
    tap = Tap(scheduler, settings, exporter, random.Random())  # noqa: S311 sampling, not secrets
    if not tap.attach():
        return None
    # atexit does not run in multiprocessing's children (the engine core is one); its finalizers do.
    multiprocessing.util.Finalize(None, exporter.stop, exitpriority=10)
    LOG.info("tracefit: step telemetry to %s", settings.target)
    return tap
