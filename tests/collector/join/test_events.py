"""Draining the join gives events, in the order in which a learner has to take them."""

from __future__ import annotations

import msgspec
import pytest

from collector.config.schema import Config
from collector.decode import decode_exports
from collector.decode.fpm import ForwardPass
from collector.decode.records import Telemetry
from collector.join.events import ConfigKeyChanged, ConfigReplaced, ConfigUpdated, Event, Rows
from collector.join.joiner import Joiner
from collector.join.spans import SpanWindow
from collector.telemetry import Counts
from online.rows import Quality, Target
from tests.support.clocks import T0_NS
from tests.support.toy_engine import MONO_NS, many_jobs, run_engine
from tests.support.toy_spans import columns_of, exports_of, pieces, stock_of

ORDER = (ConfigKeyChanged, ConfigUpdated, Rows, ConfigReplaced)


def drains(exports) -> list[list[Event]]:
    """What each export made the join say, and what was left at the end."""
    joiner, spans = Joiner(Config()), SpanWindow(64)
    events = []
    for export in exports:
        for telemetry in decode_exports([export], spans.accept, Counts()):
            joiner.add(telemetry)
        events.append(joiner.drain())
    return [*events, joiner.drain(flush=True)]


def flat(parts: list[list[Event]]) -> list[Event]:
    return [event for part in parts for event in part]


def of_server(run, **knobs):
    return exports_of(pieces(run, facts=tuple((f"vllm.{name}", value) for name, value in knobs.items())), 5)


@pytest.fixture(scope="module")
def comes_back_otherwise():
    """A server without a model's name, which is said later; then it restarts with other flags; and again."""
    first, second, third = (
        run_engine(many_jobs(n), start_ns=MONO_NS + hour * 3600 * 10**9) for hour, n in enumerate((120, 30, 20))
    )
    nameless, named = of_server(first), of_server(first, model="m", max_num_seqs="64")
    half = len(nameless) // 2
    again = [export for life in (second, third) for export in of_server(life, model="m", max_num_seqs="128")]
    return drains([*nameless[:half], *named[half:], *again])


def test_events_of_a_drain_come_in_the_order_renamed_described_restarted_rows_succeeded(comes_back_otherwise):
    described: set[str] = set()
    for part in comes_back_otherwise:
        places = [ORDER.index(type(event)) for event in part]
        assert places == sorted(places)
        described |= {event.config_id for event in part if isinstance(event, ConfigUpdated)}
        assert {event.config_id for event in part if isinstance(event, Rows)} <= described
    assert {type(event) for event in flat(comes_back_otherwise)} == set(ORDER)


def test_a_succession_comes_after_the_last_rows_of_what_the_server_was(comes_back_otherwise):
    events = flat(comes_back_otherwise)
    (at,) = [place for place, event in enumerate(events) if isinstance(event, ConfigReplaced)]
    assert any(isinstance(event, Rows) and event.config_id == events[at].old for event in events[:at])
    assert not any(isinstance(event, Rows) and event.config_id == events[at].old for event in events[at:])
    assert any(isinstance(event, Rows) and event.config_id == events[at].new for event in events[at:])


def test_an_unchanged_configuration_is_described_once():
    run = run_engine(many_jobs(60))
    described = [event for event in flat(drains(of_server(run, model="m"))) if isinstance(event, ConfigUpdated)]
    assert len({(event.config_id, event.quality) for event in described}) == len(described)
    assert described[-1].facts == {"model": "m", "num_gpu_blocks": 4097}
    assert described[-1].quality is Quality.STEPS


@pytest.mark.parametrize("name", ["pod-1", "somebody else"])
def test_request_spans_under_the_name_of_the_engine_itself_leave_its_configuration_alone(name):
    """One ``service.instance.id`` for a pod names its API processes and its engine alike."""
    run = run_engine(many_jobs(60))
    joiner = Joiner(Config())
    joiner.add(Telemetry("pod-1", {"vllm.model": "m"}, steps=columns_of(run)))
    for process in (name, "another process"):
        span = stock_of(process, 10.0, prompt=100, outputs=11, ttft_s=0.5, decode_s=1.0)
        joiner.add(Telemetry(process, {"vllm.model": "m"}, requests=[span]))
    for _ in range(2):
        joiner.drain()
        (emitters,) = joiner.emitters_by_config().values()
        assert [emitter.snapshot().last_step for emitter in emitters] == [len(run.summaries)]


def test_request_spans_of_another_version_than_discovery_says_of_the_engine_are_of_another_server():
    """The engine's resource says nothing, and the spans' says it; a model may have two names, a version has one."""
    joiner = Joiner(Config())
    joiner.resolver.discovered("engine", {"model": "alias", "vllm_version": "0.33.0"})
    joiner.add(Telemetry("engine", {}, steps=columns_of(run_engine(many_jobs(60)))))
    for version, configs in (("0.33.0", 1), ("0.12.0", 2)):
        span = stock_of(version, 10.0, prompt=100, outputs=11, ttft_s=0.5, decode_s=1.0)
        joiner.add(Telemetry(version, {"vllm.model": "m", "vllm.version": version}, requests=[span]))
        joiner.drain()
        assert len(joiner.emitters_by_config()) == configs


def passes_of(name, counts, recording=""):
    """One pass a second."""
    return [
        ForwardPass(name, at, 9e3, 0, 0, 0, 1, 100, 0, Target.STEP_TIME, T0_NS + at * 10**9, recording=recording)
        for at in counts
    ]


def rows_of(joiner):
    return [event.rows for event in joiner.drain() if isinstance(event, Rows)]


def test_recorded_rows_wait_for_an_engine_that_is_not_heard_of_before_it_may_be_late():
    joiner = Joiner(Config(allowed_lateness_s=20.0))
    joiner.add_passes(passes_of("late", range(5, 25), "file"))
    assert not rows_of(joiner), "of 5 s, heard of at 24 s"
    joiner.add_passes(passes_of("early", range(100), "file"))
    (rows,) = rows_of(joiner)
    assert rows.end_ns[-1] <= T0_NS + 79 * 10**9


def test_the_few_passes_of_an_engine_that_sends_heartbeats_from_then_on_are_learned():
    joiner, idle_s = Joiner(Config()), int(Config().idle_timeout_s)
    joiner.add_passes(passes_of("engine", range(40)))
    heartbeats = [msgspec.structs.replace(each, decode_requests=0) for each in passes_of("engine", range(40, 90))]
    joiner.add_passes(heartbeats[: idle_s - 1])
    assert not rows_of(joiner)
    joiner.add_passes(heartbeats[idle_s - 1 :])
    (rows,) = rows_of(joiner)
    assert len(rows) == 40
