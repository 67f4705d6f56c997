"""tracefit-vllm: step, request and KV-cache telemetry from an un-forked vLLM, over OTLP.

vLLM calls ``register`` in each of its processes (entry-point group ``vllm.general_plugins``). It must return at once,
import nothing heavy and never raise: an exception here would keep that process from starting.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """Arrange that every scheduler made in this process from now on is watched."""
    from .install import install  # noqa: PLC0415 nothing is loaded before vLLM asks

    install()
