"""How threads take turns: of the process that serves, as one starts it; what others decided stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from collector.config.load import load
from collector.decode import columnar
from collector.decode.columnar import CHUNK, Decoder
from collector.receive import Export
from collector.runtime import turns
from collector.telemetry import Counts
from collector.worker.pipeline import Pipeline
from tests.support.otlp_load import Stream

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


@pytest.mark.parametrize("call", ["sched_setscheduler", "sched_getscheduler", "sched_yield"])
def test_where_it_is_forbidden_a_sidecar_starts_and_works_all_the_same(call, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    def take_and_offer():
        turns.take_turns(patiently=True)
        turns.offer_turn()

    before_s = sys.getswitchinterval()
    monkeypatch.setattr(os, call, forbidden)
    try:
        with ThreadPoolExecutor(1) as thread:  # whose policy is its own
            thread.submit(take_and_offer).result(10)
        assert sys.getswitchinterval() == pytest.approx(turns.SWITCH_INTERVAL_S)
    finally:
        sys.setswitchinterval(before_s)


@pytest.fixture
def yields(monkeypatch):
    """How often this thread has left the processor to others."""
    counted = []
    monkeypatch.setattr(os, "sched_yield", lambda: counted.append(1))
    return counted


def test_a_thread_that_others_may_not_interrupt_offers_its_turn(monkeypatch, yields):
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_BATCH)
    turns.offer_turn()
    assert len(yields) == 1


def test_a_thread_that_others_may_interrupt_goes_on(monkeypatch, yields):
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    turns.offer_turn()
    assert not yields


def test_a_worker_offers_its_turn_before_each_export_and_after_each_chunk_it_decodes(monkeypatch, yields):
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_BATCH)
    exports = [Stream(1, instance="one", spans_per_rpc=30).export(number) for number in range(2)]
    Decoder().decode([(each.payload, "peer") for each in exports], lambda *_: None, Counts())
    assert len(yields) == 2 + sum(each.steps for each in exports) // CHUNK


def test_a_worker_offers_its_turn_after_each_block_it_learns_and_before_each_target_it_tells_of(monkeypatch, yields):
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_BATCH)
    monkeypatch.setattr(columnar, "offer_turn", lambda: None)
    stream, config = Stream(1, instance="one", spans_per_rpc=30), load(None, {}, "bulk")
    pipeline = Pipeline(config, "test")
    for number in range(12):
        export = stream.export(number)
        pipeline.process([Export(export.payload, "peer", None, export.spans)])
    assert pipeline.learned_rows > 10 * export.steps
    assert len(yields) > pipeline.learned_rows // config.bank.block_rows
    yields.clear()
    told = pipeline.snapshot(0, 1)
    assert len(yields) == len(told.configs[0].targets)
