"""vLLM's own endpoints, asked over a real socket by servers that behave in every way."""

import asyncio
from collections import Counter

import pytest

from collector.config import Config, Owned
from collector.decode.pages import facts_in
from collector.identity.discovery import BODY_BYTES_MAX, Discovery, ScrapedServers, read_models, read_version
from collector.identity.resolver import ConfigResolver, EngineFacts
from collector.runtime import IoLoop, SystemClock
from collector.telemetry.reasons import PullOutcome
from tests.support.page_server import PageServer

GOOD = {
    "/v1/models": b'{"data": [{"id": "meta/llama", "max_model_len": 4096}, {"id": "adapter"}]}',
    "/version": b'{"version": "0.15.1"}',
    "/metrics": (
        b'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="2048",x="a\\"b"} 1.0\n'
        b"vllm:num_requests_running 0.0\n"
    ),
}


def answering(answers):
    """A server that answers each path as told."""
    return PageServer(lambda path, _: (200, {}, answers[path]))


def in_loop(discovery, asking):
    async def ask():
        try:
            return await asking
        finally:
            await discovery.close()

    return asyncio.run(ask())


def ask(port, timeout_s=60.0):
    """Whether a server answered, the facts that it told of itself, and what its answers were counted as."""
    resolver, outcomes, facts = ConfigResolver(), Counter(), EngineFacts()
    count = lambda outcome: outcomes.update([outcome])  # noqa: E731
    discovery = Discovery(Config(), resolver, SystemClock(), IoLoop(), count, timeout_s=timeout_s)
    answered = in_loop(discovery, discovery.ask(Owned(f"http://127.0.0.1:{port}", "*")))
    resolver.apply(facts, {}, "pod", "")
    return answered, facts, outcomes


def test_a_server_tells_its_model_version_and_cache():
    with answering(GOOD) as server:
        answered, facts, outcomes = ask(server.port)
    assert answered
    assert facts.known() == {
        "block_size": 32,
        "enable_prefix_caching": True,
        "max_model_len": 4096,
        "model": "meta/llama",
        "num_gpu_blocks": 2048,
        "vllm_version": "0.15.1",
    }
    assert set(facts.sources().values()) == {"discovery"}
    assert outcomes == {PullOutcome.READ: 3}


def test_the_blocks_that_a_data_parallel_server_tells_are_shared_by_its_engines():
    line = (
        'vllm:cache_config_info{{block_size="32",engine="{0}",num_gpu_blocks="4096"}} 1.0\n'
        'vllm:num_requests_running{{engine="{0}"}} 0.0\n'
    )
    with answering(GOOD | {"/metrics": "".join(map(line.format, range(4))).encode()}) as server:
        known = ask(server.port)[1].known()
    assert (known["num_gpu_blocks"], known["block_size"]) == (1024, 32)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        pytest.param(b"<html>hello</html>", PullOutcome.UNEXPECTED, id="html"),
        pytest.param(b"[" * 100_000, PullOutcome.UNEXPECTED, id="nested"),
        pytest.param(b'{"data": 3, "version": 7}', PullOutcome.UNEXPECTED, id="other types"),
        pytest.param(b"", PullOutcome.UNEXPECTED, id="empty"),
        pytest.param(b"x" * (BODY_BYTES_MAX + 10), PullOutcome.TOO_LARGE, id="endless"),
        pytest.param(None, PullOutcome.UNREACHABLE, id="hangs"),
    ],
)
def test_other_answers_are_counted_by_reason_and_teach_nothing(body, outcome):
    with answering(dict.fromkeys(GOOD, body)) as server:
        answered, facts, outcomes = ask(server.port, timeout_s=0.05 if body is None else 60.0)
    assert not answered
    assert facts.known() == {}
    assert outcomes == {outcome: 3}


def test_scraped_servers_are_asked_with_their_token_what_their_page_does_not_tell():
    resolver, facts, others = ConfigResolver(), EngineFacts(), EngineFacts()
    with answering(GOOD) as server:
        urls = {"http://[::1]:8000": f"http://127.0.0.1:{server.port}"}
        scraped = ScrapedServers(urls.copy, lambda: "secret", None)
        discovery = Discovery(Config(), resolver, SystemClock(), IoLoop(), scraped=scraped)
        for _ in range(2):  # the second time it is not due
            in_loop(discovery, discovery.ask_due())
            assert [path for path, _ in server.asked] == ["/v1/models", "/version"]
        assert {headers["Authorization"] for _, headers in server.asked} == {"Bearer secret"}
    assert resolver.apply(facts, {}, "http://[::1]:8000", "")
    assert not resolver.apply(others, {}, "http://10.0.0.1:8000", "")
    assert facts.get("vllm_version") == "0.15.1"


def test_facts_of_impossible_value_are_left_out():
    assert read_models(b'{"data": [{"id": "", "max_model_len": -1}]}') == {}
    assert read_models(b'{"data": [{"id": "m", "max_model_len": true}]}') == {}
    assert read_version(b'{"version": null}') == {}
    nothing = b'vllm:cache_config_info{block_size="0",num_gpu_blocks="None"} 1\nvllm:num_requests_running 1\n'
    assert facts_in(nothing) == {}
    assert facts_in(b"\xff\xfe") == {}
