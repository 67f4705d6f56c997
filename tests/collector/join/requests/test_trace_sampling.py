"""Request spans of which a head sampler keeps a part: nothing is learned from them, and everybody is told."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tracefit
from collector.decode.pages import EngineReading, Flavour, Meaning, ScrapedPage
from collector.join.inferred.sampling import UNCOUNTED
from collector.recordings import Recording
from collector.service.pipeline import Pipeline
from collector.telemetry import RowDrop, table
from tests.support.page_server import RECORDED
from tests.support.pipelines import EVERY_REQUEST, by_label, new_pipeline, only_config, replayed, restarted
from tests.support.stock_requests import DIALECTS, SAMPLERS, as_told_by, kept, served_in
from tests.support.toy_spans import STOCK_SCOPE, Piece, exports_of, stock_span

ONE_SPAN = ("one span per request and no steps",)
NOT_KNOWN = ["too few requests have ended to tell whether spans are sampled"]


def random_id(number: int) -> bytes:
    return hashlib.sha256(f"trace {number}".encode()).digest()[:16]


@cache
def requests(count: int, trace_id=random_id, per_s: int = 8) -> list[Piece]:
    """So many requests a second, of 100 to 140 prompt tokens and ten decode steps."""
    spans = [
        stock_span(
            f"r{n}", n / per_s, prompt=100 + n % 40, outputs=11, ttft_s=0.1 + n % 7 / 100, decode_s=0.3 + n % 5 / 100,
            queue_s=0.001, prefill_s=0.04, trace_id=trace_id(n),
        )
        for n in range(count)
    ]  # fmt: skip
    return [Piece("api-0", STOCK_SCOPE, span) for span in sorted(spans, key=lambda span: span.end_time_unix_nano)]


def learned(sent: list[Piece]) -> Pipeline:
    return replayed(exports_of(sent), **EVERY_REQUEST)


def restarted_with_the_rule(pipeline: Pipeline) -> Pipeline:
    return restarted(pipeline, **EVERY_REQUEST)


def go_on(pipeline: Pipeline, sent: list[Piece]) -> None:
    for export in exports_of(sent):
        pipeline.process([export])


def doubts(pipeline) -> list[str]:
    """All that are said of any configuration."""
    return [doubt for config in pipeline.snapshot(0, 1).configs for doubt in config.doubts]


def client(pipeline):
    return tracefit.load(pipeline.snapshot(0, 1).to_json()).config()


def drops(pipeline):
    """Rows that were dropped since the last call, by reason."""
    return Counter(by_label(pipeline.take_counts(), table.DROPPED_ROWS))


def step_features(pipeline):
    return only_config(pipeline).targets["step_time"].models["portable"].features


@cache
def recorded_five_times() -> list[Piece]:
    return as_told_by(DIALECTS["vLLM 0.33"], served_in(5))


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_sampled_request_spans_teach_nothing_and_their_rate_is_told(rate):
    """The requests of a recorded server, five times one after another, as a head sampler lets their spans through."""
    sent = kept(recorded_five_times(), rate)
    pipeline = learned(sent)
    (doubt,) = doubts(pipeline)
    said, rest = doubt.split(" %, ", 1)
    beginning, percent = said.rsplit(" ", 1)
    assert beginning == "request spans are sampled at about"
    assert float(percent) == pytest.approx(100 * rate, rel=0.05)
    assert rest == "so the batch cannot be rebuilt; send all spans or let tracefit scrape the page"
    assert only_config(pipeline).targets == {}
    assert pipeline.learned_rows == 0
    assert drops(pipeline)[RowDrop.SAMPLED_SPANS] >= len(sent) - 20
    config = client(pipeline)
    assert not config.usable
    assert config.reasons[0] == doubt
    assert config.facts["trace_sampling"] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_whatever_a_known_sampler_makes_of_the_ids_its_rate_is_told_and_nothing_published(sampler):
    sent = kept(requests(4000), 0.1, sampler)
    pipeline = learned(sent)
    (doubt,) = doubts(pipeline)
    assert float(re.search(r"about (\S+) %", doubt)[1]) == pytest.approx(10, rel=0.05)
    assert only_config(pipeline).targets == {}
    assert pipeline.learned_rows < 3 * 64
    again = restarted(pipeline)
    assert doubts(again) == [doubt]


def statuses(pipeline) -> set[tuple[str, str | None]]:
    return {(each.status, each.reason) for each in step_features(pipeline)}


@pytest.fixture(scope="module")
def whole():
    """What was learned of a server that sends the span of every request."""
    return learned(requests(600))


def test_spans_of_nearly_all_requests_teach_weakly_and_say_why(whole):
    nearly = learned(kept(requests(1500), 0.96))
    assert doubts(nearly) == []
    assert ("weak", "sampled") in statuses(nearly)
    assert "identified" not in dict(statuses(nearly))
    verdict = client(nearly).verdict
    assert "a span of 96.0% of the requests" in verdict.hidden
    assert "sampled" not in {reason for _, reason in statuses(whole)}


def duration_ns(piece: Piece) -> int:
    return piece.span.end_time_unix_nano - piece.span.start_time_unix_nano


COLLECTORS = {
    "keeps all": lambda sent: sent,
    "the slowest": lambda sent: [each for each in sent if duration_ns(each) >= sorted(map(duration_ns, sent))[280]],
}


@pytest.mark.parametrize("which", COLLECTORS)
def test_where_no_page_counts_the_requests_nothing_is_usable_unless_the_operator_knows_of_all(which):
    """A Collector that samples by a rule of its own, or a mesh, shows nowhere, and may as well send all."""
    sent = COLLECTORS[which](requests(600, per_s=2))
    pipeline = replayed(exports_of(sent))
    assert doubts(pipeline) == doubts(restarted(pipeline)) == [UNCOUNTED]
    assert not client(pipeline).usable
    assert doubts(restarted_with_the_rule(pipeline)) == doubts(learned(sent)) == []
    assert doubts(restarted(learned(sent))) == [UNCOUNTED], "the rule is gone"
    config = only_config(pipeline)
    assert "trace_sampling" not in config.config
    features = [
        each for target in config.targets.values() for model in target.models.values() for each in model.features
    ]
    assert {each.reason for each in features} <= {"uncounted", "hidden_prefix_hits", "one_size", "collinear", "wide"}
    assert "uncounted" in {each.reason for each in features}
    assert not {"identified"} & {each.status for each in features}


SCRAPING = {"scrape": ("http://10.0.0.7:8000",)}


def counted(sent: list[Piece], hit_ratio: float) -> list[ScrapedPage]:
    """The page of their server, every second: how many requests ended, and how many of their tokens were cached."""
    ends = np.sort([piece.span.end_time_unix_nano for piece in sent])
    pages = []
    for unix_ns in range(int(ends[0]) - 10**9, int(ends[-1]) + 2 * 10**9, 10**9):
        values = [0.0] * len(Meaning)
        values[Meaning.FINISHED] = float(np.searchsorted(ends, unix_ns, side="right"))
        values[Meaning.PROMPT_TOKENS] = 120.0 * values[Meaning.FINISHED]
        values[Meaning.PREFIX_HIT_TOKENS] = hit_ratio * values[Meaning.PROMPT_TOKENS]
        reading = EngineReading("0", "tiny", Flavour.VLLM, tuple(values), {})
        pages.append(ScrapedPage("http://10.0.0.7:8000", unix_ns, unix_ns, (reading,)))
    return pages


def beside_its_page(all_sent: list[Piece], sent: list[Piece], hit_ratio: float = 0.0):
    """Spans that came, beside the page of a server that counted them all."""
    return beside_pages(counted(all_sent, hit_ratio), sent)


def beside_pages(pages: list[ScrapedPage], sent: list[Piece], front_ends: int = 1, **configured):
    pipeline = new_pipeline(**SCRAPING, **configured)
    pipeline.process(pages=[pages.pop(0)])
    for page in pipeline.joiner.pages.by_key.values():
        page.windows.front_ends = front_ends
    for export in exports_of(sent, 10):
        spans = ExportTraceServiceRequest.FromString(export.payload).resource_spans[-1].scope_spans[-1].spans
        while pages and pages[0].unix_ns <= spans[-1].end_time_unix_nano + 10**9:
            pipeline.process(pages=[pages.pop(0)])
        pipeline.process([export])
    pipeline.process(pages=pages)
    pipeline.flush()
    return pipeline


def test_a_sampler_that_does_not_show_in_the_trace_ids_shows_beside_the_page():
    """A Collector that keeps one trace of three, by whatever it likes."""
    sent = requests(600)
    pipeline = beside_its_page(sent, sent[::3])
    assert pipeline.learned_rows == 0
    assert drops(pipeline)[RowDrop.SAMPLED_SPANS] == 200
    whole = beside_its_page(sent, sent)
    assert doubts(whole) == []
    assert only_config(whole).targets["step_time"].models["portable"].rows > 400
    assert (only_config(whole).config["trace_sampling"], client(whole).verdict.hidden) == (1.0, ONE_SPAN)
    ruled = beside_pages(counted(sent, 0.0), sent, **EVERY_REQUEST)
    assert [only_config(each).sources["trace_sampling"] for each in (whole, ruled)] == ["telemetry", "rules"]
    assert ("weak", "sampled") in statuses(beside_its_page(sent, [each for n, each in enumerate(sent) if n % 30]))


def test_a_page_that_stopped_says_nothing_of_what_is_sampled_since():
    sent = requests(3000)
    pipeline = beside_pages(counted(sent[:600], 0.0), [*sent[:600], *sent[600::3]])
    assert doubts(pipeline) == [UNCOUNTED]


def test_the_page_of_one_server_does_not_speak_for_the_sampled_spans_of_another():
    sent = requests(600)
    own, others = of_process("api-0", sent), of_process("api-1", kept(sent, 0.1))
    both = sorted([*own, *others], key=lambda piece: piece.span.end_time_unix_nano)
    alone = beside_its_page(own, own).learned_rows
    assert beside_pages(counted(own, 0.0), both).learned_rows == pytest.approx(alone, abs=100)


@pytest.mark.parametrize("front_ends", [1, 2], ids=["unknown to the page", "known by its steps"])
def test_of_several_api_servers_of_one_engine_each_knows_a_part_of_every_batch(front_ends):
    sent = requests(600)
    parted = [piece._replace(instance=f"api-{n % 2}", facts=MODEL) for n, piece in enumerate(sent)]
    pipeline = beside_pages(counted(sent, 0.0), parted, front_ends)
    assert pipeline.learned_rows == 0
    assert drops(pipeline)[RowDrop.SAMPLED_SPANS] > 560


def test_the_page_tells_how_many_tokens_of_a_prompt_were_computed():
    sent = as_told_by(DIALECTS["vLLM 0.33"], served_in())
    told, hidden = beside_its_page(sent, sent, hit_ratio=0.75), learned(sent)
    assert (only_config(told).prefix_hits_hidden, only_config(hidden).prefix_hits_hidden) == (False, True)
    prices_us = [
        feature.coefficient
        for pipeline in (told, hidden)
        for feature in step_features(pipeline)
        if feature.name == "prefill_tokens"
    ]
    assert prices_us[0] == pytest.approx(4 * prices_us[1], rel=0.1)


def test_whole_request_spans_are_believed_after_a_few_dozen(whole):
    of_several = [piece for instance in ("api-0", "api-1") for piece in of_process(instance, requests(4))]
    assert doubts(learned(of_several)) == NOT_KNOWN, "said once"
    assert doubts(learned(requests(100))) == []
    assert doubts(whole) == []
    assert drops(whole)[RowDrop.SAMPLED_SPANS] == 0


MODEL = (("vllm.model", "tiny"),)


def of_process(instance: str, sent: list[Piece]) -> list[Piece]:
    return [piece._replace(instance=instance, facts=MODEL) for piece in sent]


@pytest.mark.parametrize(
    "meanwhile", [lambda pipeline: pipeline, restarted_with_the_rule], ids=["", "at a restart of ours"]
)
def test_a_sampler_that_is_switched_on_or_off_is_noticed(meanwhile):
    sent, pipeline, told = requests(1500), new_pipeline(**EVERY_REQUEST), []
    for phase in (sent[:500], kept(sent[500:1000], 0.1), sent[1000:]):
        go_on(pipeline, phase)
        told.append([doubt.split(" at ")[0] for doubt in doubts(pipeline)])
        pipeline = meanwhile(pipeline)
    assert told == [[], ["request spans are sampled"], []]


def test_the_page_of_a_server_whose_request_spans_are_sampled_is_learned_from():
    pipeline = new_pipeline()
    go_on(pipeline, kept(requests(500), 0.1))
    for timed in Recording(RECORDED, print):
        if isinstance(timed.item, ScrapedPage):
            page = timed.item
            pipeline.process(pages=[ScrapedPage("http://10.0.0.7:8000", page.unix_ns, page.mono_ns, page.engines)])
    pipeline.flush()
    config = only_config(pipeline)
    assert config.doubts == []
    assert config.telemetry == "metrics"
    assert config.targets["step_time"].models["portable"].rows > 50
