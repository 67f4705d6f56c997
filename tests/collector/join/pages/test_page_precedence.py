"""A page beside richer telemetry: the page gives facts and the yardstick, the telemetry gives the rows."""

import math
from functools import cache

import pytest

import tracefit
from collector.config import Config
from collector.decode.pages import Meaning, ScrapedPage, parse_page
from collector.join import Engine
from collector.recordings import Recording
from collector.service.pipeline import make_pipeline
from collector.telemetry import RowDrop, table
from tests.collector.join.pages.test_scrape_windows import SimulatedEngine, new_page
from tests.support.clocks import T0_NS
from tests.support.page_server import RECORDED, recorded_pages
from tests.support.paths import DATA

CONFIG = Config(learners=("rls",))


@cache
def pages():
    return [timed.item for timed in Recording(RECORDED, print) if isinstance(timed.item, ScrapedPage)]


def live(page, server="http://10.0.0.7:8000", shift_ns=0):
    return ScrapedPage(server, page.unix_ns + shift_ns, page.mono_ns, page.engines)


def exports():
    return [each.item._replace(recording="") for each in Recording(DATA / "c10_long" / "otlp.pb.gz", print)]


def learned(pipeline):
    return {config.config_id: config for config in pipeline.snapshot(0, 1).configs}


@pytest.mark.parametrize("engines", [1, 8])
def test_engines_of_a_data_parallel_server_share_the_cache_that_its_page_tells_each_of_them(engines, tmp_path):
    """vLLM 0.32 with ``--data-parallel-size 2``: both lines say the blocks of both ranks."""
    pipeline = make_pipeline(CONFIG)
    for seconds, page in recorded_pages()[:60]:
        ranks = b"".join(page.replace(b'engine="0"', b'engine="%d"' % rank) for rank in range(engines))
        at_ns = T0_NS + int(seconds * 1e9)
        pipeline.process(pages=[ScrapedPage("http://10.0.0.7:8000", at_ns, at_ns, parse_page(ranks))])
    pipeline.flush()
    (tmp_path / "snapshot.json").write_bytes(pipeline.snapshot(0, 1).to_json())
    assert tracefit.load(tmp_path / "snapshot.json").config().limits.kv_tokens == 2048 * 32 / engines


STREAM = 80
"""Exports of a recording."""


@pytest.fixture(scope="module")
def plain():
    """What steps alone teach."""
    pipeline = make_pipeline(CONFIG)
    for export in exports()[:STREAM]:
        pipeline.process([export])
    pipeline.flush()
    (config,) = learned(pipeline).values()
    return config


@pytest.mark.parametrize("name", ["http://10.0.0.7:8000", "the engine's own"])
def test_where_an_engine_sends_steps_its_page_gives_facts_and_no_rows(name, plain):
    with_pages = make_pipeline(CONFIG)
    for number, export in enumerate(exports()[:STREAM]):
        with_pages.process([export])
        if number >= STREAM // 4:
            own = next(iter(with_pages.joiner.engines.values())).instance
            with_pages.process(pages=[live(pages()[number], name if "http" in name else own)])
    with_pages.flush()
    (facts,) = learned(with_pages).values()
    assert facts.telemetry == plain.telemetry
    assert facts.config["num_gpu_blocks"] == plain.config["num_gpu_blocks"] == 2048, "the page's word, and the steps'"
    mine, theirs = (c.targets["step_time"].models["portable"].features for c in (facts, plain))
    assert [f.coefficient for f in mine] == [f.coefficient for f in theirs]
    assert with_pages.take_counts()[table.DROPPED_ROWS, RowDrop.KNOWN_FROM_STEPS] > 30


@pytest.mark.parametrize("other", ["http://10.0.0.8:8000", "http://[1.2.3.4]:80/x", "http://[::1"])
def test_of_several_servers_only_the_one_that_sends_is_left_to_its_telemetry(other):
    pipeline = make_pipeline(CONFIG)
    for export in exports()[:20]:
        pipeline.process([export])
    for page in pages()[:100]:
        pipeline.process(pages=[live(page, "http://10.0.0.7:8000"), live(page, other)])
    pipeline.flush()
    assert {config.telemetry for config in learned(pipeline).values()} >= {"metrics"}


@pytest.mark.parametrize("front_ends", [1, 2])
def test_completeness_is_steps_heard_over_steps_counted(front_ends):
    simulated, page = SimulatedEngine(), new_page()
    engine = Engine("engine", "", 0, CONFIG)
    assert math.isnan(make_pipeline(CONFIG).joiner.pages.completeness)
    for number in range(1, 90):
        simulated.run(1.0, 4)
        steps = simulated.values[Meaning.STEPS]
        page.add(number * 10**9, number * 10**9, simulated.reading(steps=front_ends * steps))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "event_unix_ns", number * 10**9)
            engine.steps_seen = int(0.8 * steps)
            page.defer_to([engine])
    assert page.completeness.ratio == pytest.approx(0.8, abs=0.01)
