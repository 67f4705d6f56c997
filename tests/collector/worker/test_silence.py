"""Silence ends waiting: what was accepted is published soon after the telemetry stopped, and what waits is said."""

from __future__ import annotations

import itertools
import logging
import math

import pytest
from prometheus_client import CollectorRegistry

from collector.config.learning_config import JoinConfig
from collector.config.schema import Config
from collector.decode.pages import ScrapedPage
from collector.join import Waiting
from collector.receive.export_request import Export
from collector.recordings import Recording
from collector.telemetry import Metrics
from collector.telemetry.reasons import Wait
from collector.worker.pipeline import Pipeline
from collector.worker.publish import Publisher
from collector.worker.silence import SilenceWatch
from exporters.status_page.waiting_section import REASONS, EngineWaiting, waiting_section
from tests.bench.bench_cost import SILENT
from tests.support.clocks import FakeClock
from tests.support.otlp_load import Stream
from tests.support.page_server import RECORDED
from tests.support.paths import DATA
from tests.support.recordings import recording
from tests.support.step_exports import make_export
from tests.support.toy_spans import STOCK_SCOPE, Piece, export_of, stock_span

SILENT_S = 30
"""By then everything is published: grace_s and ten seconds."""


class House:
    """A pipeline with its publisher and its watch, turn by turn; a clock that moves by hand."""

    def __init__(self, **settings):
        self.clock = FakeClock()
        self.metrics = Metrics(CollectorRegistry())
        self.pipeline = Pipeline(Config(learners=("rls",), **settings), "0")
        self.publisher = Publisher(self.pipeline, self.metrics, self.clock, 5.0)
        self.unread_s = 0.0
        self.watch = SilenceWatch(
            self.pipeline, self.metrics, self.clock, self.pipeline._settings.join, lambda: int(self.unread_s * 1e9)
        )
        self.copies, self.copy_s = [], 0.0
        settle = self.pipeline.settle

        def copied(config_id, keys):
            self.copies.append(config_id)
            self.clock.advance(self.copy_s)
            return settle(config_id, keys)

        self.pipeline.settle = copied

    def turn(self, *exports):
        self.pipeline.process(exports)
        self.watch.tick()
        self.publisher.tick()

    def feed(self, exports, pace_s=0.0):
        for export in exports:
            self.turn(export)
            self.clock.advance(pace_s)

    def silence(self, seconds=SILENT_S):
        for _ in range(seconds):
            self.clock.advance(1)
            self.turn()

    def rows(self, snapshot=None):
        """Rows learned of each target, as published."""
        shown = snapshot or self.publisher.current()
        return {
            name: max(model.rows for model in target.models.values())
            for config in (shown.configs if shown is not None else ())
            for name, target in config.targets.items()
        }

    def coefficients(self):
        return [config.targets["step_time"].models["portable"].features for config in self.publisher.current().configs]


def recorded_pages_of(server):
    for timed in Recording(RECORDED, print):
        yield ScrapedPage(server, timed.page.unix_ns, timed.page.mono_ns, timed.page.engines)


def steps_of(instance, first_step, steps):
    request = make_export(1, steps_per_span=steps, first_step=first_step, instance=instance)
    for event in request.resource_spans[0].scope_spans[0].spans[0].events:
        for each in event.attributes:
            if each.key in ("step.ts_start_ns", "step.ts_end_ns"):
                each.value.int_value += 10**6 * ord(instance[0])  # else the two would be one engine's
    resource = request.resource_spans[0].resource
    resource.attributes.add(key="vllm.model").value.string_value = "m"
    return Export(request.SerializeToString(), instance, "grpc", 1)


def test_the_last_few_steps_that_were_put_off_are_published_although_no_next_ones_come():
    house, stream = House(), Stream(1, spans_per_rpc=1, pool_rpcs=100)
    house.feed([Export(stream.export(number).payload, "p", "grpc", 1) for number in range(35)], pace_s=0.6)
    put_off = {one.key[1]: one.reason for one in house.pipeline.waiting()}
    assert put_off == {"load-0": Wait.NEXT_STEPS}, "else this tests nothing"
    house.silence()
    assert house.rows() == house.rows(house.pipeline.flushed().snapshot(1, 1))
    assert house.rows()["step_time"] > 3300


def test_a_benchmark_of_a_minute_is_published_although_nothing_comes_after_it():
    """The capture lasts 73 s and ends while requests are open; its first row would leave after 180."""
    house = House()
    exports = recording(DATA / "c6_saturated" / "otlp.pb.gz")
    house.feed(exports)
    assert house.publisher.current() is None
    held = house.pipeline.whole_state().body()
    house.silence()
    assert house.rows() == house.rows(house.pipeline.flushed().snapshot(1, 1))
    assert house.rows()["step_time"] > 1800
    assert house.pipeline.whole_state().body() == held, "the state waits on"
    assert len(house.copies) == 1
    house.silence(120)
    assert len(house.copies) == 1, "once per silence"


def test_a_silence_in_the_middle_changes_nothing_of_what_is_learned():
    exports = recording(DATA / "c1_mixed" / "otlp.pb.gz")
    straight, halting = House(), House()
    straight.feed(exports)
    rows = []
    for start in range(0, len(exports), len(exports) // 5):
        halting.feed(exports[start : start + len(exports) // 5])
        halting.silence()
        rows.append(halting.rows().get("step_time", 0))
    assert rows == sorted(rows), "what is published never goes back"
    assert rows[0] > 0
    assert len(halting.copies) > 1
    for house in (straight, halting):
        house.pipeline.flush()
    assert halting.pipeline.state() == straight.pipeline.state()


def test_one_engine_that_falls_silent_holds_nobody_up():
    """Two of one configuration: what both sent is published, and what the other one sends from then on."""
    house = House()
    for number in range(30):
        for instance in "ab":
            house.turn(steps_of(instance, 1 + number * 50, 50))
        house.clock.advance(1)
    for number in range(30, 60):
        house.turn(steps_of("b", 1 + number * 50, 50))
        house.clock.advance(1)
    # all of a, and what b had sent when that was last looked at; b alone would be held for three minutes
    assert house.rows()["step_time"] > 1490 + 20 * 50
    assert 1 <= len(house.copies) <= 3


def test_an_engine_whose_export_waits_to_be_read_is_not_silent():
    house = House()
    house.feed((steps_of("a", 1 + number * 50, 50) for number in range(30)), pace_s=1.0)
    for behind_s in range(1, 60):  # a queue that only grows
        house.unread_s = behind_s
        house.silence(1)
    assert house.copies == []
    house.unread_s = 0.0
    house.silence(1)
    assert len(house.copies) == 1


def test_copies_that_take_long_are_seldom():
    """Engines that take turns at being silent, of a fleet that takes 9 s to copy: once in 90 s."""
    house = House()
    house.copy_s = 9.0
    for turn in range(300):
        for instance in "abcdefgh":
            if turn // 30 % 8 != "abcdefgh".index(instance):
                house.turn(steps_of(instance, 1 + turn * 10, 10))
        house.clock.advance(1)
    assert 2 <= len(house.copies) <= 5


def test_copies_are_as_seldom_where_the_reader_catches_up():
    """One engine is silent by what was read 30 s late, the other one when all was read, 5 s later."""
    house = House()
    house.copy_s = 3.0
    for number in range(30):
        house.turn(steps_of("a", 1 + number * 50, 50), steps_of("b", 1 + number * 50, 50))
        house.clock.advance(1)
    for number in range(30, 85):
        house.unread_s = min(number - 30, 30)
        house.turn(steps_of("b", 1 + number * 50, 50))
        house.clock.advance(1)
        if house.copies:
            break
    assert len(house.copies) == 1
    house.unread_s = 0.0
    house.silence(20)
    assert len(house.copies) == 1
    house.silence(10)
    assert len(house.copies) == 2


class ManyConfigurations:
    """In each an engine is silent beside one that goes on; a copy takes longer than the pause between batches."""

    def __init__(self, clock, number):
        self.clock, self.number, self.turns, self.copied = clock, number, 0, []

    def waiting(self):
        self.turns += 1
        return [
            Waiting(("", f"{name}{one}"), f"config-{one}", 9, 0, 0, Wait.JOURNEYS, heard)
            for one in range(self.number)
            for name, heard in (("silent", 1), ("goes-on", self.turns))
        ]

    def settle(self, config_id, _):
        self.clock.advance(0.3)
        self.copied.append(config_id)
        return 9


def test_configurations_that_were_copied_wait_for_those_that_were_not():
    clock = FakeClock()
    source = ManyConfigurations(clock, 60)
    watch = SilenceWatch(source, Metrics(CollectorRegistry()), clock, JoinConfig(), lambda: 0)
    for _ in range(100):
        watch.tick()
        clock.advance(1)
    assert len(source.copied) >= 60
    assert len(set(source.copied[:60])) == 60


def test_pages_that_are_scraped_are_heard_and_their_end_is_a_silence():
    house = House()
    for _, page in zip(range(160), recorded_pages_of("http://h:8000"), strict=False):
        house.pipeline.process_pages([page])
        house.turn()
        house.clock.advance(0.5)
    assert house.copies == []
    before = house.rows().get("step_time", 0)
    house.silence()
    assert len(house.copies) == 1
    assert house.rows()["step_time"] > before  # the last 20 s
    assert house.rows()["step_time"] > 50


def test_silence_after_a_restart_counts_from_the_restart():
    house = House()
    house.turn(steps_of("a", 1, 1000))
    again = House()
    from collector.durable import read_image
    from online.state import sealed

    again.pipeline.restore(read_image(sealed(house.pipeline.whole_state().body())))
    again.silence()
    assert again.rows()["step_time"] > 990


def test_request_spans_give_coefficients_a_minute_after_thirty_answers():
    """An un-forked server whose requests take 3 to 5 s; its spans come when they end."""
    house = House()
    spans = []
    for number in range(120):
        outputs = 40 + (number * 37) % 60
        decode_s, ttft_s = outputs * 0.04, 0.3 + (number % 7) / 20
        spans.append(stock_span(f"r{number}", number / 1.3, prompt=50 + number % 90, outputs=outputs, ttft_s=ttft_s,
                                decode_s=decode_s))  # fmt: skip
    spans.sort(key=lambda span: span.end_time_unix_nano)
    answered_ns = spans[29].end_time_unix_nano
    for span, after in itertools.pairwise(spans):
        piece = Piece("api", STOCK_SCOPE, span)
        house.turn(Export(export_of([piece]).SerializeToString(), "api", "grpc", 1))
        if house.rows().get("step_time", 0) and house.coefficients()[0]:
            assert span.end_time_unix_nano - answered_ns <= 60e9
            return
        house.clock.advance((after.end_time_unix_nano - span.end_time_unix_nano) / 1e9)
    raise AssertionError("no coefficients")


def test_what_waits_is_said_by_engine_with_its_reason(caplog):
    house = House()
    with caplog.at_level(logging.INFO):
        house.feed(recording(DATA / "c6_saturated" / "otlp.pb.gz"))
        house.silence(1)
        ((waiting, silent_s),) = house.watch.waiting
        assert (waiting.reason, waiting.requests, silent_s) == (Wait.JOURNEYS, 208, 0)
        assert waiting.steps > 1800
        house.silence(25)
    ((_, silent_s),) = house.watch.waiting
    assert silent_s == 25
    instance = waiting.key[1]
    series = {"engine": instance, "what": "requests", "reason": "journeys"}
    assert house.metrics.registry.get_sample_value("tracefit_join_waiting", series) == 208
    (line,) = [record.getMessage() for record in caplog.records if "nothing comes" in record.getMessage()]
    assert SILENT in line, "by these words the bench counts silences"
    assert f"{instance} ({waiting.steps} steps, 208 requests wait: journeys)" in line


def test_a_series_of_what_waits_ends_with_the_waiting():
    house = House()
    house.turn(steps_of("a", 1, 100))
    first = {"engine": "a", "what": "steps", "reason": "first_steps"}
    assert house.metrics.registry.get_sample_value("tracefit_join_waiting", first) == 100
    house.clock.advance(1)
    house.turn(steps_of("a", 101, 1000))
    assert house.metrics.registry.get_sample_value("tracefit_join_waiting", first) is None


@pytest.mark.parametrize("learned", [True, False])
def test_the_page_says_what_waits_and_escapes_who_does(learned):
    assert waiting_section([], learned=learned) == ""
    shown = waiting_section([EngineWaiting("<b>", 1852, 207, 0, "journeys", 12.0)], learned=learned)
    assert "1,852" in shown
    assert "207" in shown
    assert REASONS["journeys"] in shown
    assert "&lt;b&gt;" in shown
    many = [EngineWaiting(f"e{number}", number, 0, 0, "turn", 1.0) for number in range(40)]
    assert "28 more engines" in waiting_section(many, learned=learned)


def test_every_reason_to_wait_has_its_words():
    assert set(REASONS) == set(Wait)


def test_a_window_shorter_than_the_grace_is_no_trouble():
    house = House(join=JoinConfig(window_s=1, grace_s=0))
    house.turn(steps_of("a", 1, 600))
    house.silence(11)
    assert house.rows()["step_time"] > 590


def test_rows_that_wait_for_their_block_are_told_once_nothing_comes():
    house = House(join=JoinConfig(window_s=1, grace_s=0))
    house.turn(steps_of("a", 1, 600))
    house.silence(3)
    told, generation = house.rows()["step_time"], house.publisher.generation
    house.silence(11)
    assert told < house.rows()["step_time"]
    assert house.publisher.generation == generation + 1
    house.silence(60)
    assert house.publisher.generation == generation + 1


def test_the_watch_says_when_the_next_engine_will_have_been_silent_for_the_grace():
    house = House()
    assert house.watch.due_in_s() == math.inf, "nobody was heard of"
    house.feed([steps_of(name, 1, 40) for name in ("a", "b")], pace_s=4.0)
    grace_s = house.pipeline._settings.join.grace_s
    assert house.watch.due_in_s() == grace_s - 8.0
    house.clock.advance(grace_s - 8.0)
    house.turn()
    assert house.copies, "a fell silent"
    assert house.watch.due_in_s() == 4.0
    house.clock.advance(3.9)
    assert house.watch.due_in_s() == 1.0, "but looks no more often than it may"
    house.clock.advance(1.0)
    house.turn()
    assert house.watch.due_in_s() == math.inf
