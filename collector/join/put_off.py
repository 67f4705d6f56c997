"""Which rows are made later: those of a few steps, together with those of the next ones.

To make rows of a few steps costs nearly as much as of many. The rows are the same in the end, and up to four seconds of
the engine's time later. Rows of an engine that falls silent wait until others' time has passed half of
``grace_s``, or until silence ends it (:class:`collector.join.waiting.Waiting` says so: ``next_steps``).
"""

from __future__ import annotations

from collector.config import JoinConfig

from .engine import Engine

_FEW_STEPS = 512
_SHORT_NS = 4_000_000_000
"""Less than the pause between two generations."""


def put_off_until(engine: Engine, settings: JoinConfig) -> int:
    """Event time (wall clock ns) of whomever, up to which what an engine told since its newest row may wait; 0: now.

    It may where that is little, its summaries say all, and nothing else waits for its rows.
    """
    if len(engine.processes) != 1 or not engine.released or engine.open_requests:
        return 0
    sequence = engine.processes[0].sequence
    window, emitted_to = sequence.window, sequence.frontier.emitted_to
    if window is None or not emitted_to or emitted_to < window.base:
        return 0
    if not sequence.context.has_exact_context or sequence.kv.known:
        return 0
    since_ns, half_grace_ns = sequence.safe_unix_ns, int(settings.grace_s * 1e9) // 2
    few = window.newest_step + 1 - emitted_to < _FEW_STEPS
    short = sequence.event_unix_ns - since_ns < min(_SHORT_NS, half_grace_ns)
    return since_ns + half_grace_ns if few and short else 0
