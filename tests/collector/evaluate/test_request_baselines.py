"""Single requests in an evaluation: what a router knows of them, and who foretells them how well."""

from __future__ import annotations

import numpy as np
import pytest

from collector.cli import main
from collector.evaluate import baselines as request_baselines
from collector.evaluate.baselines import BASELINES, NOT_INSTALLED, judge_requests
from collector.evaluate.captures import Request
from tests.support.toy_spans import export_of
from tests.tracefit.example_snapshot import config_of

S = 1_000_000_000


def served(arrived_s, first_s, last_s, prompt=100, output=11):
    arrived, first, last = (int(each * S) for each in (arrived_s, first_s, last_s))
    return Request(
        prompt_tokens=prompt,
        output_tokens=output,
        arrived_ns=arrived,
        first_token_ns=first,
        finished_ns=last,
        delivered_ns=last,
    )


def stream(config, requests=600, seed=1):
    """An open loop against the client's own formulas, with some noise."""
    chance = np.random.default_rng(seed)
    out, at_s = [], 0.0
    ends = []
    for _ in range(requests):
        at_s += chance.exponential(0.15)
        running = 1 + sum(end > at_s for end in ends[-200:])
        said = config.request(prompt_tokens=600, output_tokens=100, concurrency=running)
        first_s = at_s + said.ttft.us / 1e6 * chance.uniform(0.95, 1.05)
        last_s = first_s + 99 * said.itl.us / 1e6 * chance.uniform(0.99, 1.01)
        ends.append(last_s)
        out.append(served(at_s, first_s, last_s, 600, 100))
    return out


@pytest.fixture(scope="module")
def client():
    return config_of()


@pytest.fixture(scope="module")
def requests(client):
    return stream(client)


def judged(requests, client):
    end_ns = max(each.delivered_ns for each in requests)
    return judge_requests(requests, client, int(0.6 * end_ns), end_ns)


def test_the_client_and_both_baselines_are_judged_on_the_last_fifth(requests, client):
    pytest.importorskip("sklearn")
    report = judged(requests, client)
    assert [score["model"] for score in report.scores] == ["request", "request at arrival", *BASELINES]
    assert report.learned == pytest.approx(360, abs=40)
    assert report.judged == pytest.approx(120, abs=30)
    for score in report.scores:
        assert score["ttft_median"] < 0.1
        assert score["tpot_median"] < 0.1
        assert score["ttft_median"] <= score["ttft_p90"]
    assert report == judged(requests, client)
    assert report.note == ""


def test_without_the_extra_one_sentence_says_how_to_get_it(requests, client, monkeypatch):
    monkeypatch.setattr(request_baselines.importlib.util, "find_spec", lambda _: None)
    report = judged(requests, client)
    assert [score["model"] for score in report.scores] == ["request", "request at arrival"]
    assert report.note == NOT_INSTALLED
    assert "install tracefit's extra evaluate" in report.note


def test_few_requests_or_nothing_learned_are_no_comparison(requests, client):
    assert judged(requests[:90], client) is None
    assert judged(requests, None) is None
    assert judge_requests([], client, 0, 0) is None


def test_coefficients_that_cannot_answer_say_so(requests, client):
    report = judged(requests, client.assuming(kv_tokens=10))
    assert report.scores == []
    assert "fits" in report.note


def test_the_command_prints_and_draws_the_comparison(requests, tmp_path, capsys):
    from google.protobuf.internal.encoder import _VarintBytes

    from tests.support.toy_spans import STOCK_SCOPE, Piece, stock_span

    pieces = [
        Piece(
            "api-0",
            STOCK_SCOPE,
            stock_span(
                str(number),
                each.arrived_ns / S,
                prompt=each.prompt_tokens,
                outputs=each.output_tokens,
                ttft_s=(each.first_token_ns - each.arrived_ns) / S,
                decode_s=(each.finished_ns - each.first_token_ns) / S,
            ),
        )
        for number, each in enumerate(sorted(requests, key=lambda each: each.delivered_ns))
    ]
    exports = [export_of(pieces[at : at + 20]).SerializeToString() for at in range(0, len(pieces), 20)]
    path = tmp_path / "stock.pb"
    path.write_bytes(b"".join(_VarintBytes(len(each)) + each for each in exports))
    assert main(["lab", "evaluate", str(path), "--systems", "portable"]) == 0
    printed = capsys.readouterr().out
    assert "single requests: learned from" in printed
    assert "request at arrival" in printed
