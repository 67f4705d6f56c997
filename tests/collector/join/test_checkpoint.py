"""A restart keeps how engines are read and up to when their rows left: nothing is learned twice, little is lost."""

import msgspec
import numpy as np
import pytest

from collector.config.schema import Config
from collector.decode import Export, Telemetry
from collector.decode.pages import ScrapedPage
from collector.decode.vocabulary import TIME_MAX
from collector.join import Joiner, Rows
from collector.join.emitter import Scheduling
from collector.telemetry import RowDrop, table
from online import STEP_FEATURES, RowOutcome, Target
from tests.collector.join.pages.test_scrape_windows import SimulatedEngine
from tests.support.clocks import T0_NS
from tests.support.pipelines import new_pipeline, replayed, restarted
from tests.support.recordings import otlp_file, recording
from tests.support.step_exports import make_export
from tests.support.toy_engine import UNIX_NS, Job, many_jobs, run_engine
from tests.support.toy_spans import exports_of, pieces, stock_of

SETTINGS = Config()


@pytest.fixture(scope="module")
def stream():
    """A recording as it came live."""
    return [export._replace(recording="") for export in recording(otlp_file("c3_preempt"))]


@pytest.fixture
def before(stream):
    """The process that is killed behind four fifths of it."""
    pipeline = new_pipeline()
    for export in stream[: int(0.8 * len(stream))]:
        pipeline.process([export])
    return pipeline


def learned(counts):
    return counts[table.ROWS, Target.STEP_TIME, RowOutcome.LEARNED]


def test_rows_before_the_mark_are_counted_and_not_made_again_when_the_whole_log_is_read(stream, before):
    after = restarted(before)
    after.process(stream)
    after.flush()
    counts = after.take_counts()
    first, whole = (learned(each.take_counts()) for each in (before, replayed(stream)))
    assert first > 0
    assert counts[table.DROPPED_ROWS, RowDrop.LEARNED_BEFORE] >= 0.98 * first
    assert 0.99 * whole <= first + learned(counts) <= whole


@pytest.mark.parametrize("first_step", [1, 2001])
def test_an_engine_whose_host_s_clock_was_set_back_before_the_restart_is_learned_from(first_step):
    """By a day; it is the same process or a new one."""
    ahead = new_pipeline()
    day = make_export(100, steps_per_span=20, begin_ns=T0_NS + 86_400 * 10**9)
    ahead.process([Export(day.SerializeToString(), "peer", 100)])
    ahead.flush()
    after = restarted(ahead, now_unix_ns=T0_NS + 3_600 * 10**9)
    now = make_export(100, steps_per_span=20, first_step=first_step)
    after.process([Export(now.SerializeToString(), "peer", 100)])
    after.flush()
    assert learned(after.take_counts()) > 1_900


def test_a_configuration_is_known_at_once_after_a_restart(before):
    after = Joiner.from_checkpoint(before.joiner.to_checkpoint(), SETTINGS)
    ((config_id, (emitter,)),) = after.emitters_by_config().items()
    (known,) = before.joiner.emitters_by_config()[config_id]
    assert emitter.facts.as_dict() == known.facts.as_dict()
    assert emitter.snapshot().scheduling == known.snapshot().scheduling == "sync"


def test_after_a_restart_too_rows_wait_for_requests_as_long_as_those_that_have_ended():
    """Streams of 90 s beside answers of a second: of their batch, half would be missing."""
    long = [(start, 90.0) for first in (10, 55) for start in np.arange(first, 400, 90.1)]
    spans = [
        stock_of(f"{start} {took_s}", start, prompt=100, outputs=int(50 * took_s) + 1, ttft_s=0.1, decode_s=took_s)
        for start, took_s in [*long, *((start, 1.0) for start in np.arange(10, 400, 0.5))]
    ]
    joiner, is_restarted, batches = Joiner(SETTINGS), False, []
    for span in sorted(spans, key=lambda each: each.end_unix_ns):
        if not is_restarted and span.end_unix_ns > UNIX_NS + 195 * 10**9:
            joiner, is_restarted = Joiner.from_checkpoint(joiner.to_checkpoint(), SETTINGS), True
        joiner.add(Telemetry("api", {"vllm.model": "m"}, requests=[span]))
        rows = [event.rows for event in joiner.drain() if isinstance(event, Rows) and event.target is Target.STEP_TIME]
        batches += [rows.raw[:, STEP_FEATURES.index("decode_requests")].mean() for rows in rows if is_restarted]
    assert np.mean(batches[:30]) == pytest.approx(4.0, abs=0.5)


@pytest.mark.parametrize(("first_step", "pause_ns"), [(0, 0), (1, 1_800_000_000 * 10**9)])
def test_what_an_engine_claims_of_its_first_steps_leaves_a_checkpoint_that_all_can_start_from(
    before, first_step, pause_ns
):
    """Its ids may begin at 0, and its first step may have begun before 1970."""
    request = make_export(2, steps_per_span=100, first_step=first_step, instance="strange")
    for span in request.resource_spans[0].scope_spans[0].spans:
        for event in span.events[2:]:
            for attribute in event.attributes:
                if attribute.key.startswith("step.ts_"):
                    attribute.value.int_value += pause_ns
    before.process([Export(request.SerializeToString(), "peer", 2)])
    before.joiner.drain(flush=pause_ns > 0)
    after = Joiner.from_checkpoint(before.joiner.to_checkpoint(), SETTINGS)
    assert after.engines.keys() == before.joiner.engines.keys()
    assert len(after.engines) == 2


def test_the_longest_request_that_can_be_said_leaves_a_checkpoint_that_all_can_start_from(before):
    (engine,) = before.joiner.engines.values()
    engine.process.longest_run_ns = TIME_MAX
    after = Joiner.from_checkpoint(before.joiner.to_checkpoint(), SETTINGS)
    assert after.engines[engine.key].process.longest_run_ns == TIME_MAX


def test_front_ends_as_many_as_a_page_says_leave_a_checkpoint_that_all_can_start_from():
    settings = Config(scrape=("http://a:1/metrics",))
    joiner = Joiner(settings)
    joiner.add_page(ScrapedPage("a", 10**18, 10**9, (SimulatedEngine().reading(),)))
    for copies in (8, 1 << 80):
        for page in joiner.pages.by_key.values():
            page.windows.front_ends = copies
        (page,) = Joiner.from_checkpoint(joiner.to_checkpoint(), settings).pages.by_key.values()
        assert page.windows.front_ends == min(copies, 1024)


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.clear(),
        lambda plain: plain.pop("emitters"),
        lambda plain: plain["emitters"][0].update(kind="unheard_of"),
        lambda plain: plain["emitters"][0]["queueing"].update(wait_us=float("nan")),
        lambda plain: plain["emitters"][0]["calibration"]["sums"].update(blocks=float("inf")),
        lambda plain: plain["emitters"][0]["calibration"].update(emitted_step=-1),
        lambda plain: plain.update(marks=[["a", {"no_target": 1}]]),
    ],
)
def test_what_is_no_checkpoint_is_refused(before, damage):
    plain = before.joiner.to_checkpoint()
    damage(plain)
    with pytest.raises(msgspec.ValidationError):
        Joiner.from_checkpoint(plain, SETTINGS)


def test_how_an_engine_schedules_is_not_decided_anew_by_the_few_stamps_behind_a_restart():
    """Its requests are long, so that its first steps are used before any of them ends."""
    long = [Job(f"long {i}", 200, 3000, queued_step=1000 + 1000 * i) for i in range(5)]
    run = run_engine(many_jobs(60) + long, asynchronous=True)
    exports, settings = exports_of(pieces(run, apis=False), 1), {"join_timeout_s": 5.0}
    before = new_pipeline(**settings)
    for export in exports[:-40]:
        before.process([export])
    after = restarted(before, **settings)
    for export in exports[-40:]:
        after.process([export])
    (engine,) = after.joiner.engines.values()
    assert engine.process.calibrated_step > 0
    assert engine.process.scheduling is Scheduling.ASYNC
