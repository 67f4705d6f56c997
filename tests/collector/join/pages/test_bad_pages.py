"""Pages that are no series of one server's: what is learned from them is nothing, and it is said why."""

import pytest

from collector.config import Config
from collector.decode.pages import ScrapedPage
from collector.service import make_pipeline
from collector.telemetry import RowDrop
from tests.collector.join.pages.test_scrape_windows import SimulatedEngine, drops_of, new_page
from tests.support.pipelines import only_config


def two_servers():
    """One of them has been up for longer."""
    servers = [SimulatedEngine(seed=1), SimulatedEngine(seed=2)]
    servers[0].run(300.0, 5)
    return servers


def turns(servers, pattern, page, seconds=40, begin_ns=0):
    """One page every half second of whichever server the pattern says."""
    for scrape in range(int(seconds / 0.5)):
        at_ns = begin_ns + scrape * 500_000_000
        for server in servers:
            server.run(0.5, 5)
        page.add(10**18 + at_ns, at_ns, servers["ab".index(pattern[scrape % len(pattern)])].reading())


@pytest.mark.parametrize("pattern", ["ab", "aab", "abb", "aaabbb"])
def test_several_servers_that_answer_at_one_address_in_turn_teach_nothing(pattern):
    page = new_page()
    turns(two_servers(), pattern, page)
    assert drops_of(page)[RowDrop.RESTART] > 1
    assert sum(len(rows) for _, rows in page.advance()) <= len(pattern)  # before anybody could know


def test_two_servers_of_one_model_share_a_configuration_and_neither_spoils_the_other():
    pipeline = make_pipeline(Config(learners=("rls",)))
    servers = {"http://10.0.0.1:8000": SimulatedEngine(seed=1), "http://10.0.0.2:8000": SimulatedEngine(seed=2)}
    for number in range(240):
        at_ns = number * 500_000_000
        for url, server in servers.items():
            server.run(0.5, (3, 8, 1, 5)[number // 20 % 4])
            pipeline.process(pages=[ScrapedPage(url, 10**18 + at_ns, at_ns, (server.reading(),))])
    pipeline.flush()
    config = only_config(pipeline)
    assert [engine.instance for engine in config.engines] == list(servers)
    intercept, prefill, *_ = config.targets["step_time"].models["portable"].features
    assert intercept.coefficient == pytest.approx(10_000, rel=0.15)
    assert prefill.coefficient == pytest.approx(200, rel=0.15)
