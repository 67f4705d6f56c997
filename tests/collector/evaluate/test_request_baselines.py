"""Single requests in an evaluation: what a router knows of them, and who predicts their times how well."""

import numpy as np
import pytest

from collector.config import Config
from collector.evaluate import baselines
from collector.evaluate.baselines import BASELINES, NOT_INSTALLED, judge_requests
from collector.evaluate.captures import REQUEST, load
from collector.recordings import Recording
from tests.support.recordings import otlp_file
from tests.tracefit.example_snapshot import config_of

CLIENT = config_of()
S = 1_000_000_000
STAMPS = ("arrived_ns", "first_token_ns", "finished_ns", "delivered_ns")


@pytest.fixture(scope="module")
def requests():
    """An open loop against the client's own formulas, with some noise; in order of their ends."""
    chance, at_s = np.random.default_rng(1), 0.0
    table = np.zeros(600, REQUEST)
    for number, request in enumerate(table):
        at_s += chance.exponential(0.15)
        running = 1 + int((table["finished_ns"][:number] > at_s * S).sum())
        said = CLIENT.request(prompt_tokens=600, output_tokens=100, concurrency=running)
        first_s = at_s + said.ttft.us / 1e6 * chance.uniform(0.95, 1.05)
        last_s = first_s + 99 * said.itl.us / 1e6 * chance.uniform(0.99, 1.01)
        for name, seconds in zip(STAMPS, (at_s, first_s, last_s, last_s), strict=True):
            request[name] = int(seconds * S)
    table["prompt_tokens"], table["output_tokens"] = 600, 100
    return np.sort(table, order="delivered_ns")


def judged(requests, client=CLIENT):
    end_ns = int(requests["delivered_ns"].max(initial=0))
    return judge_requests(requests, client, int(0.6 * end_ns), end_ns)


def test_the_client_and_both_baselines_are_judged_on_the_last_fifth(requests):
    pytest.importorskip("sklearn")
    report = judged(requests)
    assert [score["model"] for score in report.scores] == ["request", "request at arrival", *BASELINES]
    assert report.learned == pytest.approx(360, abs=40)
    assert report.judged == pytest.approx(120, abs=30)
    for score in report.scores:
        assert score["ttft_median"] <= score["ttft_p90"]
        assert max(score["ttft_median"], score["tpot_median"]) < 0.1
    assert report.note == ""


def test_without_the_extra_one_sentence_says_how_to_get_it(requests, monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda _: None)
    report = judged(requests)
    assert [score["model"] for score in report.scores] == ["request", "request at arrival"]
    assert report.note == NOT_INSTALLED


def test_few_requests_or_nothing_learned_are_no_comparison(requests):
    assert judged(requests[:90]) is judged(requests[:0]) is judged(requests, None) is None


def test_coefficients_that_cannot_answer_say_so(requests):
    report = judged(requests, CLIENT.assuming(kv_tokens=10))
    assert report.scores == []
    assert "fits" in report.note


def test_request_spans_of_an_un_forked_server_are_its_requests():
    path = otlp_file("c8_stock_0.32.0")
    (capture,) = load(path, list(Recording(path, print)), Config(), 0.6)
    requests = capture.requests
    assert len(requests) > 60
    assert (requests["arrived_ns"] < requests["first_token_ns"]).all()
    assert (requests["first_token_ns"] <= requests["finished_ns"]).all()
    assert not requests["scheduled_ns"].any()
    assert capture.client.request(prompt_tokens=100, output_tokens=50, concurrency=4).itl.us > 0
