"""vLLM's own endpoints, asked over a real socket by servers that behave in every way."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter

import pytest

from collector.config import Config, Owned
from collector.decode.pages import facts_in
from collector.identity.discovery import BODY_BYTES_MAX, Discovery, read_models, read_version
from collector.identity.knowledge import EngineFacts, Knowledge
from collector.runtime.tasks import SystemClock
from collector.telemetry.reasons import Asked
from tests.support.page_server import PageServer

GOOD = {
    "/v1/models": (200, b'{"data": [{"id": "meta/llama", "max_model_len": 4096}, {"id": "adapter"}]}'),
    "/version": (200, b'{"version": "0.15.1"}'),
    "/metrics": (
        200,
        b'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="2048",x="a\\"b"} 1.0\n',
    ),
}


@pytest.fixture
def serve():
    """Start a server that answers each path as told."""
    with contextlib.ExitStack() as servers:

        def start(answers):
            def answer(path, _):
                status, body = answers.get(path, (404, b""))
                return status, {"Location": "http://127.0.0.1:1/"} if status == 302 else {}, body

            return f"http://127.0.0.1:{servers.enter_context(PageServer(answer)).port}"

        yield start


def _in_loop(discovery, asking):
    async def ask():
        try:
            return await asking
        finally:
            await discovery.close()

    return asyncio.run(ask())


def _ask(url, timeout_s=60.0):
    knowledge = Knowledge()
    outcomes = Counter()
    count = lambda outcome: outcomes.update([outcome])  # noqa: E731
    discovery = Discovery(Config(), knowledge, SystemClock(), count, timeout_s=timeout_s)
    answered = _in_loop(discovery, discovery.ask(Owned(url, "*")))
    facts = EngineFacts()
    knowledge.apply(facts, {}, "pod", "")
    return answered, facts, outcomes


def test_a_server_tells_its_model_version_and_cache(serve):
    answered, facts, outcomes = _ask(serve(GOOD))
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
    assert outcomes == {Asked.TAKEN: 3}


def test_the_blocks_that_a_data_parallel_server_tells_are_shared_by_its_engines(serve):
    line = 'vllm:cache_config_info{{block_size="32",engine="{}",num_gpu_blocks="4096"}} 1.0\n'
    page = "".join(map(line.format, range(4))).encode()
    answered, facts, _ = _ask(serve({**GOOD, "/metrics": (200, page)}))
    assert answered
    assert (facts.known()["num_gpu_blocks"], facts.known()["block_size"]) == (1024, 32)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ((302, b""), Asked.REFUSED),
        ((200, b"<html>hello</html>"), Asked.UNEXPECTED),
        ((200, b"[" * 100_000), Asked.UNEXPECTED),
        ((200, b'{"data": 3, "version": 7}'), Asked.UNEXPECTED),
        ((200, b""), Asked.UNEXPECTED),
        ((500, b"{}"), Asked.REFUSED),
        ((200, b"x" * (BODY_BYTES_MAX + 10)), Asked.TOO_LARGE),
    ],
)
def test_other_answers_are_counted_by_reason_and_teach_nothing(serve, answer, outcome):
    answered, facts, outcomes = _ask(serve(dict.fromkeys(GOOD, answer)))
    assert not answered
    assert facts.known() == {}
    assert outcomes == {outcome: 3}


def test_a_server_that_hangs_costs_its_timeout_and_no_more():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answered, _, outcomes = _ask(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.05)
    assert not answered
    assert outcomes == {Asked.UNREACHABLE: 3}


def test_nobody_there_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    _, _, outcomes = _ask(f"http://127.0.0.1:{port}")
    assert outcomes == {Asked.UNREACHABLE: 3}


def test_what_is_not_http_is_unexpected():
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        for _ in range(3):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    _, _, outcomes = _ask(f"http://127.0.0.1:{listener.getsockname()[1]}")
    thread.join(60)
    listener.close()
    assert outcomes == {Asked.UNEXPECTED: 3}


class Scraped:
    """A scraper that knows these servers."""

    enabled, tls = True, None

    def __init__(self, urls):
        self.urls = urls

    def token(self):
        return "secret"

    def base_urls(self):
        return dict(self.urls)


def test_scraped_servers_are_asked_with_their_token_what_their_page_does_not_tell():
    answers = {path: body for path, (_, body) in GOOD.items()}
    with PageServer(lambda path, _: (200, {}, answers[path])) as server:
        knowledge, outcomes = Knowledge(), []
        scraped = Scraped({"http://[::1]:8000": f"http://127.0.0.1:{server.port}"})
        discovery = Discovery(Config(), knowledge, SystemClock(), outcomes.append, scraped)
        assert 0.0 < _in_loop(discovery, discovery._ask_due()) <= 5.0
        assert [path for path, _ in server.asked] == ["/v1/models", "/version"]
        assert {headers["Authorization"] for _, headers in server.asked} == {"Bearer secret"}
        _in_loop(discovery, discovery._ask_due())
        assert len(server.asked) == 2  # not due again
    facts, others = EngineFacts(), EngineFacts()
    assert knowledge.apply(facts, {}, "http://[::1]:8000", "")
    assert not knowledge.apply(others, {}, "http://10.0.0.1:8000", "")
    assert facts.get("vllm_version") == "0.15.1"
    scraped.urls.clear()
    assert _in_loop(discovery, discovery._ask_due()) == pytest.approx(5.0, abs=0.5)


def test_who_is_gone_is_asked_no_more_and_who_does_not_answer_keeps_nobody_waiting(serve):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        urls = {"gone": f"http://127.0.0.1:{free.getsockname()[1]}", "here": serve(GOOD)}
        knowledge = Knowledge()
        discovery = Discovery(Config(), knowledge, SystemClock(), scraped=Scraped(urls))
        assert _in_loop(discovery, discovery._ask_due()) == 0.0  # the other one is due at once
        _in_loop(discovery, discovery._ask_due())
    facts = EngineFacts()
    assert knowledge.apply(facts, {}, "here", "")


def test_facts_of_impossible_value_are_left_out():
    assert read_models(b'{"data": [{"id": "", "max_model_len": -1}]}') == {}
    assert read_models(b'{"data": [{"id": "m", "max_model_len": true}]}') == {"model": "m"}
    assert read_version(b'{"version": null}') == {}
    assert facts_in(b'vllm:cache_config_info{block_size="0",num_gpu_blocks="None"} 1') == {}
    assert facts_in(b"\xff\xfe") == {}
