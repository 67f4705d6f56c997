"""How threads take turns: one that runs may go on until it waits, since whoever is woken could not go on without it.

Only one thread of an interpreter computes at a time. A handler that is woken while another thread computes gets the
processor, finds the interpreter taken and goes to sleep again: two switches for nothing, several times in each of calls
that follow one another. Under ``SCHED_BATCH`` the kernel lets a woken thread wait for its turn, and who computes for
long has to offer it, or each of the several turns that a call needs comes some milliseconds later. Other processes
offer none: on a core that they keep busy, it does. sched(7), sched_yield(2).
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 0.001
"""A handler that has its answer ready waits this long for the interpreter while the worker computes; the default of
5 ms, paid several times in a call, is most of what an exporter would notice."""


def take_turns(*, patiently: bool) -> None:
    """For this thread and those that it starts; whoever chose another policy than the usual one has decided."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if patiently and sys.platform == "linux":
        with contextlib.suppress(OSError):  # nothing but time is lost where it is forbidden
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def offer_turn() -> None:
    """Whoever waits goes first: for a thread that computes for long, wherever a piece of its work ends."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_BATCH:
                os.sched_yield()
