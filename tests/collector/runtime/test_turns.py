"""How threads take turns: of the process that serves, as one starts it; what others decided stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from collector.runtime import turns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies of Linux")

_SCRIPT = """
import json, os, sys, threading
from collector.runtime import take_turns

def policy():
    told.append(os.sched_getscheduler(0))

told = []
threads = [threading.Thread(target=policy) for _ in range(2)]
threads[0].start()
threads[0].join()
take_turns(patiently=sys.argv[1] == "patiently")
threads[1].start()
threads[1].join()
print(json.dumps([*told, sys.getswitchinterval()]))
"""


def _told(how: str, *before: str) -> list[float]:
    command = [*before, sys.executable, "-c", _SCRIPT, how]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_threads_that_start_afterwards_let_the_one_that_runs_go_on():
    assert _told("patiently") == [os.SCHED_OTHER, os.SCHED_BATCH, pytest.approx(turns.SWITCH_INTERVAL_S)]


def test_unless_it_is_asked_for_a_thread_that_is_woken_runs_at_once():
    assert _told("at once") == [os.SCHED_OTHER, os.SCHED_OTHER, pytest.approx(turns.SWITCH_INTERVAL_S)]


def test_whoever_chose_a_policy_keeps_it():
    assert _told("patiently", "chrt", "--idle", "0")[:2] == [os.SCHED_IDLE, os.SCHED_IDLE]


def test_where_it_is_forbidden_a_sidecar_starts_all_the_same(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    before_s = sys.getswitchinterval()
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    try:
        turns.take_turns(patiently=True)
        assert sys.getswitchinterval() == pytest.approx(turns.SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before_s)
