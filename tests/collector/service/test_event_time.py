"""Idle sources: what was accepted is learned soon after the telemetry stopped, and what is pending is said."""

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace

from collector.config.schema import Config
from collector.decode import Export
from collector.recordings import Recording
from collector.runtime.tasks import SteadyClock
from collector.service.pipeline import Pipeline
from collector.service.publish import Publisher
from collector.service.watches import EventTime
from collector.telemetry import JoinEvent, Metrics, table
from exporters.what_if import Advisory
from tests.support.clocks import T0_NS, FakeClock
from tests.support.gpu_server import step_payloads
from tests.support.page_server import RECORDED
from tests.support.pipelines import replayed, value_of
from tests.support.recordings import otlp_file, recording
from tests.support.step_exports import make_export
from tests.support.toy_spans import STOCK_SCOPE, Piece, export_of, stock_span

BEGIN_NS = T0_NS + 7 * 86_400 * 10**9
"""After all recordings, none of whose times lie ahead then."""
IDLE_S = 30
"""By then everything is published: idle_timeout_s and ten seconds."""


class House:
    """A pipeline with its publisher and the clock that ends waiting, turn by turn; time moves by hand."""

    def __init__(self, **settings):
        self.clock = FakeClock(BEGIN_NS)
        self.metrics = Metrics()
        self.pipeline = Pipeline(Config(learners=("rls",), **settings))
        self.publisher = Publisher(self.pipeline, self.metrics, self.clock, 5.0, Advisory().verdict)
        self.unread_s = 0.0
        self.arrivals = SteadyClock(self.clock)
        self.event_time = EventTime(self.pipeline, self.metrics, self.clock, lambda: int(self.unread_s * 1e9))

    def turn(self, *exports):
        self.pipeline.process([each._replace(arrived_unix_ns=self.arrivals.unix_nano()) for each in exports])
        self.event_time.tick()
        self.publisher.tick()

    def feed(self, exports, pace_s=0.0):
        for export in exports:
            self.turn(export)
            self.clock.advance(pace_s)

    def silence(self, seconds=IDLE_S):
        for _ in range(seconds):
            self.clock.advance(1)
            self.turn()

    def rows(self):
        """Rows learned of each target, as published."""
        shown = self.publisher.current()
        return rows_in(shown.configs if shown is not None else ())


def steps_of(instance, first_step, steps):
    """Of two engines that are never at the same moment in the same step, which would be one engine's."""
    request = make_export(1, steps_per_span=steps, first_step=first_step, instance=instance)
    for event in request.resource_spans[0].scope_spans[0].spans[0].events:
        for each in event.attributes:
            if each.key in ("step.ts_start_ns", "step.ts_end_ns"):
                each.value.int_value += 10**6 * ord(instance)
    request.resource_spans[0].resource.attributes.add(key="vllm.model").value.string_value = "m"
    return Export(request.SerializeToString(), instance, 1)


def rows_in(configs):
    rows = Counter()
    for config in configs:
        rows.update({name: max(m.rows for m in target.models.values()) for name, target in config.targets.items()})
    return dict(rows)


def replayed_rows(exports):
    """Rows of each target when nothing comes after the last export."""
    return rows_in(replayed(exports).snapshot(0, 1).configs)


def live(name):
    """A recording as a sender's exports."""
    return [export._replace(recording="") for export in recording(otlp_file(name))]


@pytest.mark.parametrize("name", ["c6_saturated", "steps of a plugin"])
def test_what_ends_while_much_is_open_is_published_although_nothing_comes_after_it(name):
    """The recording lasts 73 s; its first row would leave after 180."""
    recorded = name == "c6_saturated"
    house, exports = House(), live(name) if recorded else [Export(one, "p", 1) for one in step_payloads(35)]
    house.feed(exports, pace_s=0.0 if recorded else 0.6)
    assert not recorded or house.publisher.current() is None
    house.silence()
    assert house.rows() == replayed_rows(exports)
    assert house.rows()["step_time"] > 1800
    assert house.event_time.pending is None


@pytest.mark.parametrize(("name", "pauses"), [("c6_saturated", 9), ("c7_async_sim", 9), ("c9_dp2", 5)])
def test_pauses_amid_requests_cost_no_row(name, pauses):
    """Summaries trail the requests, and the requests that run are told of when they end: after the pause."""
    exports, house, rows = live(name), House(), []
    for start in range(0, len(exports), -(-len(exports) // pauses)):
        house.feed(exports[start : start + -(-len(exports) // pauses)])
        house.silence()
        rows.append(house.rows().get("step_time", 0))
    assert rows == sorted(rows), "what is published never goes back"
    assert rows[pauses // 2] > 0, "a pause does not withhold what is known"
    house.silence(int(Config().join_timeout_s))
    assert house.pipeline.take_counts()[table.JOIN_EVENTS, JoinEvent.STEP_LATE] == 0
    assert house.rows()["step_time"] == replayed_rows(exports)["step_time"]


def test_one_engine_that_is_idle_holds_nobody_up():
    """Two of one configuration: what both sent is published, and what the other one sends from then on."""
    house = House()
    for number in range(30):
        for instance in "ab":
            house.turn(steps_of(instance, 1 + number * 50, 50))
        house.clock.advance(1)
    for number in range(30, 60):
        house.turn(steps_of("b", 1 + number * 50, 50))
        house.clock.advance(1)
    # all of a; of b what is older than the allowed lateness, 20 s of 50 steps of 20 ms each
    assert house.rows()["step_time"] > 1490 + 1500


def test_an_engine_whose_export_waits_to_be_read_is_not_idle():
    house = House()
    house.feed((steps_of("a", 1 + number * 50, 50) for number in range(30)), pace_s=1.0)
    for behind_s in range(1, 60):  # a queue that only grows
        house.unread_s = behind_s
        house.silence(1)
    assert house.event_time.pending, "it is still waited for"
    house.unread_s = 0.0
    house.silence(1)
    assert house.event_time.pending is None


def test_arrival_tells_who_is_idle_whatever_times_a_sender_claims():
    house = House()
    for first_step in (1, 51):  # of a week ago, by the clock here
        house.turn(steps_of("a", first_step, 50))
        house.silence(15)
    assert house.event_time.pending.engines == 1
    house.silence(10)
    assert house.event_time.pending is None


def test_pages_give_their_last_rows_when_scraping_ends():
    house = House()
    for timed in itertools.islice(Recording(RECORDED, print), 160):
        house.pipeline.process(pages=[timed.item])
        house.turn()
        house.clock.advance(0.5)
    house.silence()
    assert house.rows()["step_time"] > 50


def test_request_spans_give_coefficients_a_minute_after_thirty_answers():
    """An un-forked server whose requests take 3 to 5 s; its spans come when they end."""
    house = House()
    spans = []
    for number in range(120):
        outputs = 40 + (number * 37) % 60
        spans.append(stock_span(f"r{number}", number / 1.3, prompt=50 + number % 90, outputs=outputs,
                                ttft_s=0.3 + (number % 7) / 20, decode_s=outputs * 0.04))  # fmt: skip
    spans.sort(key=lambda span: span.end_time_unix_nano)
    for span, after in itertools.pairwise(spans[:1] + spans):
        house.clock.advance((after.end_time_unix_nano - span.end_time_unix_nano) / 1e9)
        house.turn(Export(export_of([Piece("api", STOCK_SCOPE, after)]).SerializeToString(), "api", 1))
        if house.rows().get("step_time"):
            break
    (config,) = house.publisher.current().configs
    assert config.targets["step_time"].models["portable"].features
    assert after.end_time_unix_nano - spans[29].end_time_unix_nano <= 60e9


def test_what_is_pending_is_said_and_until_when():
    house = House()
    house.feed(live("c6_saturated"))
    house.silence(1)
    pending = house.event_time.pending
    assert (pending.requests, pending.until_unix_ns) == (208, BEGIN_NS + 20 * 10**9)
    assert pending.steps > 1800
    assert value_of(house.metrics, table.PENDING, "requests") == 208
    house.silence()
    assert (house.event_time.pending, value_of(house.metrics, table.PENDING, "requests")) == (None, 0)


def test_what_is_said_of_the_load_of_the_last_minutes_ends_with_them_also_of_a_server_whose_idle_page_comes_on():
    house, pages = House(), [timed.item for timed in itertools.islice(Recording(RECORDED, print), 160)]
    for page in pages:
        house.pipeline.process(pages=[replace(page, unix_ns=house.clock.unix_nano(), recording="")])
        house.turn()
        house.clock.advance(0.5)
    (config,) = house.publisher.current().configs
    assert house.pipeline.workload_of(config.config_id) is not None
    generation = house.publisher.current().generation
    for _ in range(24):
        house.silence(15)
        page = replace(page, unix_ns=house.clock.unix_nano(), mono_ns=page.mono_ns + 15 * 10**9, recording="")
        house.pipeline.process(pages=[page])
    assert house.pipeline.workload_of(config.config_id) is None
    said = house.publisher.current().generation
    house.silence(900)
    assert generation < house.publisher.current().generation == said


@pytest.mark.parametrize("back_s", [30, 3600])
def test_what_waits_is_not_waited_for_longer_after_the_clock_here_was_set_back(back_s):
    house, begin_ns = House(), BEGIN_NS
    for first_step in range(1, 3000, 50):
        if first_step == 1501:
            before = house.rows()["step_time"]
            house.clock.set_back(back_s)
            begin_ns -= back_s * 10**9
        export = make_export(steps_per_span=50, first_step=first_step, begin_ns=begin_ns)
        house.feed([Export(export.SerializeToString(), "a", 1)], pace_s=1.0)
    house.silence()
    assert house.rows()["step_time"] > before + 1400
    assert house.event_time.pending is None
