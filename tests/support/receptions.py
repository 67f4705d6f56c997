"""What stands behind a receiver: its queue without a worker, so that a test decides when there is room."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from collector.ingest.intake import Intake
from collector.ingest.queue import AdmissionQueue
from collector.runtime.tasks import SystemClock
from collector.telemetry.metrics import Metrics

MIB = 1 << 20


class Queue(AdmissionQueue):
    """It counts who has asked for room, also while they wait for it."""

    asked = 0

    async def put(self, *item, **how):
        self.asked += 1
        return await super().put(*item, **how)


class Reception:
    """The intake of a receiver of some transport; ``offer`` stands in for its own."""

    def __init__(self, offer=None, *, wait_s=0.1, capacity_bytes=MIB) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.queue = Queue(SystemClock(), capacity_bytes=capacity_bytes, wait_s=wait_s)
        self.intake = Intake(self.queue, self.metrics)
        if offer is not None:
            self.intake.offer = offer

    def fill(self) -> None:
        """There is no room."""
        self.queue.put_nowait(None, self.queue.capacity_bytes)
