"""The scheduler that a user names: vLLM's own, watched. Importing this module imports vLLM's schedulers."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]

from .settings import dig
from .tap import traced


class TracedScheduler(traced(Scheduler)):  # type: ignore[misc]
    """What ``--scheduler-cls`` takes. One name stands for both of vLLM's schedulers, as vLLM itself would choose.

    vLLM chooses by the scheduling mode only where no class is named, and a subclass of the synchronous scheduler alone
    would make partial batches under asynchronous scheduling.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the asynchronous one where the configuration says so."""
        config = kwargs.get("vllm_config", args[0] if args else None)
        overlaps = cls is TracedScheduler and dig(config, "scheduler_config.async_scheduling")
        return super().__new__(TracedAsyncScheduler if overlaps else cls)


class TracedAsyncScheduler(TracedScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling."""
