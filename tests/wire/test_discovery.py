"""vLLM's own endpoints, asked over a real socket by servers that behave in every way."""

import asyncio
from collections import Counter

import pytest

from collector.config import Config
from collector.decode.pages import facts_in
from collector.identity.resolver import ConfigResolver, EngineFacts
from collector.ingest.discovery import BODY_BYTES_MAX, QUESTIONS, read_models, read_version, request_facts
from collector.ingest.scrape import Scraper
from collector.runtime import Clock, running
from collector.runtime.http import HttpClient
from collector.telemetry.reasons import PullOutcome
from tests.support.clocks import eventually
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


def ask(port, timeout_s=60.0):
    """The facts that a server told of itself, and what its answers were counted as."""
    outcomes = Counter()

    async def asked():
        client = HttpClient(timeout_s)
        try:
            return await request_facts(
                client, f"http://127.0.0.1:{port}", QUESTIONS, lambda outcome: outcomes.update([outcome])
            )
        finally:
            await client.close()

    return asyncio.run(asked()), outcomes


def test_a_server_tells_its_model_version_and_cache():
    with answering(GOOD) as server:
        facts, outcomes = ask(server.port)
    assert facts == {
        "block_size": 32,
        "enable_prefix_caching": True,
        "max_model_len": 4096,
        "model": "meta/llama",
        "num_gpu_blocks": 2048,
        "vllm_version": "0.15.1",
    }
    assert outcomes == {PullOutcome.READ: 3}


def test_the_blocks_that_a_data_parallel_server_tells_are_shared_by_its_engines():
    line = (
        'vllm:cache_config_info{{block_size="32",engine="{0}",num_gpu_blocks="4096"}} 1.0\n'
        'vllm:num_requests_running{{engine="{0}"}} 0.0\n'
    )
    with answering(GOOD | {"/metrics": "".join(map(line.format, range(4))).encode()}) as server:
        known, _ = ask(server.port)
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
        facts, outcomes = ask(server.port, timeout_s=0.05 if body is None else 60.0)
    assert (facts, outcomes) == ({}, {outcome: 3})


def fact_of(resolver, instance, name):
    facts = EngineFacts()
    resolver.apply(facts, {}, instance, "")
    return facts.get(name)


def test_scraped_servers_are_asked_with_their_token_what_their_page_does_not_tell_and_others_everything(tmp_path):
    (tmp_path / "token").write_text("secret")
    with answering(GOOD) as page, answering(GOOD) as other:
        scraped, resolver = f"http://[::ffff:127.0.0.1]:{page.port}", ConfigResolver()
        config = Config(
            scrape=(scraped,),
            scrape_interval_s=3600.0,
            scrape_token_file=str(tmp_path / "token"),
            discover=(f"pod-*=http://127.0.0.1:{other.port}/",),
        )
        with running(Scraper(config, Clock(), learn_facts=resolver.discovered)):
            eventually(lambda: fact_of(resolver, scraped, "vllm_version") and fact_of(resolver, "pod-1", "block_size"))
            eventually(lambda: len(page.asked) == 3)
    assert fact_of(resolver, scraped, "block_size") is fact_of(resolver, "http://127.0.0.1:8000", "model") is None
    assert [sorted(path for path, _ in server.asked) for server in (page, other)] == [sorted(GOOD)] * 2, "each once"
    assert {headers["Authorization"] for _, headers in page.asked} == {"Bearer secret"}
    assert not any("Authorization" in headers for _, headers in other.asked)


def test_a_server_that_has_not_answered_is_asked_who_it_is_again(monkeypatch):
    monkeypatch.setattr("collector.ingest.scrape.REFRESH_S", 0.05)
    answers, told = iter([503] * 3), {}
    with PageServer(lambda path, _: (next(answers, 200), {}, GOOD[path])) as server:
        config = Config(discover=(server.url.removesuffix("/metrics"),))
        with running(Scraper(config, Clock(), learn_facts=told.__setitem__)):
            eventually(lambda: told)
    assert told["*"]["model"] == "meta/llama"


def test_facts_of_impossible_value_are_left_out():
    assert read_models(b'{"data": [{"id": "", "max_model_len": -1}]}') == {}
    assert read_models(b'{"data": [{"id": "m", "max_model_len": true}]}') == {}
    assert read_version(b'{"version": null}') == {}
    nothing = b'vllm:cache_config_info{block_size="0",num_gpu_blocks="None"} 1\nvllm:num_requests_running 1\n'
    assert facts_in(nothing) == {}
    assert facts_in(b"\xff\xfe") == {}
