"""Records of forward passes over a real socket, read by the sidecar's own reader."""

import logging
import os
import socket
from itertools import count, islice, pairwise
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import zmq
from tracefit_vllm import fpm, publisher
from tracefit_vllm.fpm import ForwardPasses
from tracefit_vllm.settings import Settings

from collector.decode.fpm import ForwardPass, read_record
from online import Target
from tests.plugin.conftest import scheduler_to
from tests.plugin.fakes import Request, Scheduler, drive, vllm_config
from tests.support.clocks import eventually
from tests.support.processes import free_port


class Listener:
    """A subscriber that reads as the sidecar does."""

    def __init__(self, port):
        self.url = f"tcp://127.0.0.1:{port}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.subscribe(b"")
        self._socket.connect(self.url)

    def take(self, enough, timeout_s=30):
        """Records until there are enough."""
        passes = []
        while not (passes and enough(passes)):
            assert self._socket.poll(timeout_s * 1000), passes
            passed = read_record(self._socket.recv_multipart()[-1], 1)
            assert isinstance(passed, ForwardPass), passed
            passes.append(passed)
        return passes

    def close(self):
        self._socket.close()
        self._context.term()


@pytest.fixture(autouse=True)
def _soon_idle(monkeypatch):
    monkeypatch.setattr(fpm, "HEARTBEAT_S", 0.3)


@pytest.fixture
def listener():
    made = Listener(free_port())
    yield made
    made.close()


def connected(listener, scheduler):
    """Drive until the listener is there; a heartbeat tells, and its number is returned."""
    scheduler.add_request(Request("first", 5, 2))
    drive(scheduler, 3)
    return listener.take(lambda passes: passes[-1].is_empty)[-1].counter


def test_a_run_reaches_the_reader_pass_by_pass_with_host_time_and_then_heartbeats(listener):
    with mock.patch.dict(os.environ, OTEL_RESOURCE_ATTRIBUTES="service.instance.id=pod-1"):
        scheduler = scheduler_to(listener.url)
    connected(listener, scheduler)
    before = len(scheduler.passes)
    scheduler.add_request(Request("a", 100, 5))
    scheduler.add_request(Request("b", 30, 8))
    drive(scheduler, 20)
    told = listener.take(lambda passes: len(passes) > 8 and passes[-1].is_empty)
    busy = [passed for passed in told if not passed.is_empty]
    assert [msgspec.structs.astuple(passed)[3:9] for passed in busy] == scheduler.passes[before:]
    assert {(one.instance, one.target) for one in told} == {("pod-1", Target.STEP_TIME)}
    assert {one.wall_us > 0 for one in busy} == {True}
    assert {one.wall_us for one in told if one.is_empty} == {0}, "an empty step is none"
    assert {second.counter - first.counter for first, second in pairwise(told)} == {1}
    scheduler.shutdown()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_that_cannot_be_summed_up_is_a_gap_in_the_count_and_not_time_of_the_next(listener, monkeypatch, is_last):
    class Failing(Scheduler):
        calls = 0

        def get_request_counts(self):
            self.calls -= 1
            if self.calls == 0:
                raise RuntimeError
            return super().get_request_counts()

    scheduler = scheduler_to(listener.url, Failing)
    number = connected(listener, scheduler)
    times_ns = count(10**18, 10**6)  # a millisecond between two readings, of which a step makes four
    monkeypatch.setattr("tracefit_vllm.tap.time", SimpleNamespace(monotonic_ns=lambda: next(times_ns)))
    scheduler.add_request(Request("a", 5, 6 if is_last else 20))
    drive(scheduler, 5)
    scheduler.calls = 2  # the second is the plugin's
    drive(scheduler, 1 if is_last else 10)
    if is_last:
        next(islice(times_ns, 10**5, None))  # the engine is idle
        scheduler.add_request(Request("b", 5, 5))
        drive(scheduler, 5)
    told = listener.take(lambda passes: passes[-1].is_empty and any(not one.is_empty for one in passes))
    busy = [one for one in told if not one.is_empty]
    after_idle = {3000} if is_last else set()  # from its own first reading
    assert {round(one.wall_us) for one in busy[1:]} == {4000} | after_idle
    counters = [number, *(one.counter for one in told)]
    assert sorted(second - first for first, second in pairwise(counters)) == [*[1] * (len(told) - 1), 2]
    scheduler.shutdown()


def test_records_that_the_full_queue_drops_are_a_gap_in_the_count(listener, monkeypatch):
    monkeypatch.setattr(publisher, "QUEUE_STEPS", 4)
    scheduler = scheduler_to(listener.url)
    number = connected(listener, scheduler)
    scheduler.add_request(Request("a", 5, 50))
    for _ in range(50):  # much faster than the queue is emptied
        scheduler.update_from_output(scheduler.schedule(), "outputs")
    told = listener.take(lambda passes: passes[-1].is_empty and any(not one.is_empty for one in passes))
    heartbeats = sum(one.is_empty for one in told)
    assert told[-1].counter - number == 50 + heartbeats
    assert len(told) - heartbeats < 50
    scheduler.shutdown()


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_each_data_parallel_rank_has_a_port_of_its_own(moe):
    settings = Settings("tcp://127.0.0.1:20380")
    wires = [ForwardPasses(Scheduler(config=vllm_config(rank=rank, ranks=2, moe=moe)), settings) for rank in (0, 1)]
    assert [wire.address for wire in wires] == ["tcp://127.0.0.1:20380", "tcp://127.0.0.1:20381"]


def test_a_port_that_is_taken_is_said_once_and_serving_goes_on(caplog):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        caplog.at_level(logging.WARNING, "vllm.plugins.tracefit"),
    ):
        scheduler = scheduler_to(f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        scheduler.add_request(Request("a", 20, 30))
        drive(scheduler, 5)
        eventually(lambda: "Address already in use" in caplog.text)
        drive(scheduler, 40)
    assert scheduler.finished[0].num_output_tokens == 30
    assert len(caplog.messages) == 1
