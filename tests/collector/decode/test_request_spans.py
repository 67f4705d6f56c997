"""Requests of servers without a fork: told by their attributes, whoever sends them and however they are spelled."""

from __future__ import annotations

import functools
import math

import pytest

from collector.decode import MISSING
from collector.telemetry import Counts, Skip, table
from tests.support.pipelines import assert_accounted, by_label, only_config, replayed
from tests.support.step_exports import attribute
from tests.support.stock_requests import DIALECTS, Dialect, Served, served_in
from tests.support.toy_engine import UNIX_NS
from tests.support.toy_spans import Piece, decoded, exports_of

REQUEST = Served(UNIX_NS, 90, 11, 10**7, 2 * 10**8, 25 * 10**7, 5 * 10**8)


def spelled(dialect: Dialect, cached: int = 30, without: str = "", **values):
    """The request's span, without one attribute, or with some of another value or kind."""
    span = REQUEST.span(dialect, 7, cached=cached)
    for each in [*span.attributes]:
        if each.key == without or each.key in values:
            span.attributes.remove(each)
    span.attributes.extend(attribute(key, value) for key, value in values.items())
    return span


@pytest.mark.parametrize("engine", DIALECTS)
def test_every_engine_s_span_says_when_a_request_came_and_what_it_took(engine):
    dialect = DIALECTS[engine]
    (request,) = decoded(Piece("a", dialect.scope, spelled(dialect))).requests
    assert (request.arrival_unix_ns, request.prompt_tokens, request.output_tokens) == (UNIX_NS, 90, 11)
    assert (request.first_token_s, request.decode_s) == (0.25, 0.5)
    assert math.isnan(request.queue_s) if engine == "SGLang" else request.queue_s == 0.01
    assert math.isnan(request.prefill_s) if engine == "TensorRT-LLM" else request.prefill_s == 0.2
    assert request.cached_tokens == (30 if dialect.cached else MISSING)
    assert request.model == ("tiny" if engine == "the convention" else "")


ODD = {
    "no end": ({"without": "gen_ai.latency.e2e"}, Skip.LACKS_E2E),
    "no first token": ({"without": "gen_ai.latency.time_to_first_token"}, Skip.LACKS_FIRST_TOKEN),
    "no prompt": ({"without": "gen_ai.usage.prompt_tokens"}, Skip.LACKS_INPUT_TOKENS),
    "no answer": ({"without": "gen_ai.usage.completion_tokens"}, Skip.LACKS_OUTPUT_TOKENS),
    "both spellings, two numbers": ({"gen_ai.usage.input_tokens": 91}, Skip.INVALID),
    "both spellings of the answer": ({"gen_ai.usage.output_tokens": 10}, Skip.INVALID),
    "two counts of cached tokens": ({"gen_ai.usage.cache_read.input_tokens": 29}, Skip.INVALID),
    "more cached than there are": ({"gen_ai.usage.cached_tokens": 91}, Skip.INVALID),
    "tokens as text": ({"gen_ai.usage.prompt_tokens": "90"}, Skip.INVALID),
    "tokens below none": ({"gen_ai.usage.cached_tokens": -1}, Skip.OUT_OF_RANGE),
    "tokens beyond all": ({"gen_ai.usage.prompt_tokens": 2**30}, Skip.OUT_OF_RANGE),
    "a latency that is none": ({"gen_ai.latency.e2e": math.nan}, Skip.INVALID),
    "several tokens in no time": ({"gen_ai.latency.time_in_model_decode": 0.0}, Skip.INVALID),
    "a last token long after its span's end": ({"gen_ai.latency.time_in_model_decode": 1.6}, Skip.INVALID),
    "a latency below none": ({"gen_ai.latency.time_in_queue": -0.1}, Skip.OUT_OF_RANGE),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_span_that_nearly_fits_or_contradicts_itself_is_counted_by_its_reason_and_left_out(odd):
    (values, reason), counts = ODD[odd], Counts()
    span = spelled(DIALECTS["SGLang"], **values)
    assert not decoded(Piece("a", "sglang server", span), counts=counts).requests
    assert_accounted(counts, span)
    assert by_label(counts, table.DECODED_SPANS) == {reason: 1}


def test_both_spellings_may_say_the_same_and_seconds_may_be_whole():
    values = {"gen_ai.usage.input_tokens": 90, "gen_ai.usage.output_tokens": 11, "gen_ai.latency.e2e": 1}
    (request,) = decoded(Piece("a", "sglang server", spelled(DIALECTS["SGLang"], **values))).requests
    assert (request.prompt_tokens, request.output_tokens, request.first_token_s) == (90, 11, 0.25)


def test_a_request_that_ended_before_its_first_token_is_refused():
    span, counts = spelled(DIALECTS["TensorRT-LLM"], **{"gen_ai.latency.e2e": 0.1}), Counts()
    assert not decoded(Piece("a", "tensorrt_llm", span), counts=counts).requests
    assert by_label(counts, table.DECODED_SPANS) == {Skip.INVALID: 1}


@functools.cache
def served():
    return served_in()[:350]


@functools.cache
def learned(name: str, cached_ratio: float = 0.0):
    """The configuration of a real server's requests as an engine tells them, and what a step takes in it."""
    dialect = DIALECTS[name]
    spans = [each.span(dialect, n, cached=int(cached_ratio * each.prompt)) for n, each in enumerate(served())]
    pipeline = replayed(exports_of([Piece("server", dialect.scope, span) for span in spans], 200))
    config = only_config(pipeline)
    return config, {each.name: each for each in config.targets["step_time"].models["portable"].features}


def test_the_same_requests_teach_the_same_whoever_tells_them():
    """A real server's, under the scopes, names and words of five engines."""
    told = {name: {each.name: each.coefficient for each in learned(name)[1].values()} for name in DIALECTS}
    usual = told["vLLM 0.33"]
    assert len(usual) == 4
    assert told.pop("TensorRT-LLM") == pytest.approx(usual, rel=1e-6), "its decode time is a difference"
    assert [name for name, found in told.items() if found != usual] == []


def test_cached_tokens_are_no_prefill_and_end_the_hidden_hits():
    """Three tokens of four were cached: what is left costs four times as much, and that is the price of computing."""
    prices = []
    for name, ratio, hidden in (("vLLM 0.33", 0.0, True), ("SGLang", 0.0, False), ("SGLang", 0.75, False)):
        config, features = learned(name, ratio)
        assert config.prefix_hits_hidden == hidden
        assert (features["prefill_tokens"].reason == "hidden_prefix_hits") == hidden
        prices.append(features["prefill_tokens"].coefficient)
    assert prices[0] == prices[1]
    assert prices[2] == pytest.approx(4 * prices[1], rel=0.05)
