"""Silence ends waiting: what was accepted is published soon after the telemetry stopped, and what waits is said."""

from __future__ import annotations

import itertools
import logging

from prometheus_client import CollectorRegistry

from collector.config.schema import Config
from collector.decode.pages import ScrapedPage
from collector.ingest.intake import Export
from collector.recordings import Recording
from collector.service.pipeline import Pipeline
from collector.service.publish import Publisher
from collector.service.silence import SilenceWatch
from collector.telemetry import Metrics
from collector.telemetry.reasons import Wait
from exporters.wording import WAITS
from tests.support.clocks import FakeClock
from tests.support.gpu_server import step_payloads
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
    house = House()
    house.feed([Export(payload, "p", "grpc", 1) for payload in step_payloads(35)], pace_s=0.6)
    assert [one.reason for one in house.pipeline.waiting()] == [Wait.NEXT_STEPS], "else this tests nothing"
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
    assert f"{instance} ({waiting.steps} steps, 208 requests wait: journeys)" in line


def test_a_series_of_what_waits_ends_with_the_waiting():
    house = House()
    house.turn(steps_of("a", 1, 100))
    first = {"engine": "a", "what": "steps", "reason": "first_steps"}
    assert house.metrics.registry.get_sample_value("tracefit_join_waiting", first) == 100
    house.clock.advance(1)
    house.turn(steps_of("a", 101, 1000))
    assert house.metrics.registry.get_sample_value("tracefit_join_waiting", first) is None


def test_every_reason_to_wait_has_its_words():
    assert set(WAITS) == set(Wait)
