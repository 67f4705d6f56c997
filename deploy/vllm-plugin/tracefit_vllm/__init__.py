"""tracefit-vllm: a record of each forward pass of a vLLM as released.

    vllm serve … --scheduler-cls tracefit_vllm.TracedScheduler

vLLM loads this package in each of its processes (entry-point group ``vllm.general_plugins``). Nothing heavy is imported
here, and nothing is done: the scheduler's class is found by its name, or by ``register`` where the user asked for it.
"""

from __future__ import annotations

import os
from typing import Any

__version__ = "0.1.0"


def register() -> None:
    """With ``TRACEFITVLLM_HOOK=1``, watch whatever scheduler vLLM chooses; else do nothing. Never raises.

    vLLM calls it, and an exception here would keep the calling process from starting.
    """
    if os.environ.get("TRACEFITVLLM_HOOK", "") in ("", "0"):
        return
    from .tap import hook  # noqa: PLC0415 only who asks for the hook pays for it

    hook()


def __getattr__(name: str) -> Any:
    """``TracedScheduler``, whose module imports vLLM's schedulers."""
    if name == "TracedScheduler":
        from .scheduler import TracedScheduler  # noqa: PLC0415

        return TracedScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
