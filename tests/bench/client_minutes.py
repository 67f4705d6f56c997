"""Recordings with the client's own clock: learned on the first part, asked for each later minute's mean mix.

Truth is the client's: time between first and last chunk by tokens. The mix is what a request that decodes meets, on the
mean over the minute's decodes: how many requests, their mean prompt and output, and the share of prompt tokens that
were never computed.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import tracefit
from collector.config.schema import Config
from collector.evaluate.captures import load
from collector.recordings import Recording
from tests.support.recordings import messages

LEARN_UNTIL = 0.6
MINUTE_NS = 60e9
HITS_FROM_PROMPTS = ("c10_long",)  # every step summary arrived, and it has prefix hits
LIMITS = {
    "c1_mixed": {"max_num_seqs": 32},
    "c2_long_prefill_mp": {"max_num_seqs": 32, "max_num_batched_tokens": 512},
    "c6_saturated": {"max_num_seqs": 8},
    "c10_long": {"max_num_seqs": 32, "max_num_batched_tokens": 1024},
}
"""What the server of each recording was started with."""


class Sent(NamedTuple):
    """One request as its client saw it, on the clock of the telemetry."""

    sent_ns: int
    first_ns: int | None
    last_ns: int | None
    end_ns: int
    prompt: int
    output: int


class Minute(NamedTuple):
    """One minute's mix, its true ITL, and what was predicted."""

    prompt: float
    output: float
    met: float
    prefix_hit: float
    true_us: float
    said: tracefit.Estimate

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.said.us / self.true_us - 1.0

    @property
    def inside(self) -> bool:
        """Whether the truth lies in the published band."""
        return self.said.low <= self.true_us <= self.said.high


def judge(directory: Path) -> list[Minute]:
    """Every later minute of one recording."""
    path = directory / "otlp.pb.gz"
    (capture,) = load(path, list(Recording(path, print)), Config(), LEARN_UNTIL)
    config = capture.client.assuming(**LIMITS[directory.name])
    requests, offset_ns = _requests(directory)
    steps = _steps(messages(path))
    start, end = capture.cut_ns - offset_ns, max(each.end_ns for each in requests)
    minutes = max(1, round((end - start) / MINUTE_NS))
    edges = [start + index * (end - start) / minutes for index in range(minutes + 1)]
    return [_minute(config, directory.name, window, requests, steps) for window in pairwise(edges)]


def _minute(config, name, window, requests, steps):
    def share(begin, end):
        return max(0.0, min(window[1], end) - max(window[0], begin)) / max(end - begin, 1)

    streamed = [each for each in requests if each.first_ns and each.output > 1 and each.last_ns > each.first_ns]
    decoding = [(each, share(each.first_ns, each.last_ns)) for each in streamed]
    true_us = sum((each.last_ns - each.first_ns) * part for each, part in decoding) / 1e3
    true_us /= sum((each.output - 1) * part for each, part in decoding)
    inside = [each for each in steps if window[0] <= each[0] < window[1]]
    met = max(1.0, sum(n * decodes for _, _, n, decodes in inside) / max(1, sum(decodes for *_, decodes in inside)))
    hit = 0.0
    if name in HITS_FROM_PROMPTS:
        sent = sum(each.prompt for each in requests if window[0] <= each.sent_ns < window[1])
        hit = min(1.0, max(0.0, 1.0 - sum(prefill for _, prefill, _, _ in inside) / max(1, sent)))
    alive = [(each, share(each.sent_ns, each.end_ns)) for each in requests]
    beside = [(each, part * _mean_decodes(inside, each)) for each, part in alive if part > 0.0]
    weight = sum(part for _, part in beside)
    prompt, output = (sum(getattr(each, of) * part for each, part in beside) / weight for of in ("prompt", "output"))
    said = config.request(prompt_tokens=prompt, output_tokens=output, concurrency=met, prefix_hit=hit)
    return Minute(prompt, output, met, hit, true_us, said.itl)


def _mean_decodes(steps, request):
    """Mean decodes per step while the request was there: so often others meet it."""
    begin, end = (bisect_left(steps, at, key=_start_ns) for at in (request.sent_ns, request.end_ns))
    return sum(decodes for *_, decodes in steps[begin:end]) / max(1, end - begin)


def _start_ns(step):
    return step[0]


def _requests(capture):
    found = []
    with gzip.open(capture / "client.jsonl.gz", "rt") as file:
        for line in map(json.loads, file):
            if line["outcome"] != "done":
                continue
            prompt = (line.get("usage") or {}).get("prompt_tokens") or line["words_in"] + 3  # the chat template's
            whole = line["finish_reason"] == "length" or not line.get("n_chunks")
            output = line["max_tokens"] if whole else line["n_chunks"]
            first, last = line.get("first_chunk_mono_ns"), line.get("last_chunk_mono_ns")
            found.append(
                Sent(line["sent_mono_ns"], first, last, line["end_mono_ns"], prompt * line["n"], output * line["n"])
            )
            offset_ns = line["sent_unix_ns"] - line["sent_mono_ns"]
    return found, offset_ns


def _steps(exports):
    """Start, prefill tokens, requests and decode requests of every step that was told, in order."""
    found = []
    for data in exports:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    found += [_summary(event) for event in span.events if event.name.endswith("BATCH_SUMMARY")]
    return sorted(found)


def _summary(event):
    value = {each.key: each.value.int_value for each in event.attributes}
    decodes = value["batch.num_decode_reqs"]
    requests = value["batch.num_prefill_reqs"] + decodes
    return value["step.ts_start_ns"], value["batch.prefill_tokens"], requests, decodes
