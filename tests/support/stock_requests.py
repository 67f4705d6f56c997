"""A recording's requests as the spans of servers without a fork, in the words of each engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from collector.decode import Finish, SpanEventKind
from tests.support.recordings import payloads
from tests.support.step_exports import put
from tests.support.toy_spans import Piece, telemetry_in

LATENCIES = ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")


class Dialect(NamedTuple):
    """How an engine says it: scope and name of its span, how it spells the tokens, and which latencies it has."""

    scope: str
    name: str
    prompt: str = "prompt_tokens"
    output: str = "completion_tokens"
    cached: str = ""
    latencies: Sequence[str] = LATENCIES
    more: Mapping[str, object] = {}


DIALECTS = {
    "vLLM 0.15": Dialect("vllm.llm_engine", "llm_request", more={"gen_ai.request.temperature": 1.0}),
    "vLLM 0.33": Dialect("vllm.tracing.otel", "llm_request", more={"gen_ai.request.n": 1}),
    "SGLang": Dialect(
        "sglang server", " Req 1a2b3c4d", cached="cached_tokens",
        latencies=(*LATENCIES[:2], *LATENCIES[3:]), more={"gen_ai.response.finish_reasons": '["stop"]'},
    ),
    "TensorRT-LLM": Dialect("tensorrt_llm", "llm_request", latencies=LATENCIES[:3], more={"gen_ai.request.n": 1}),
    "the convention": Dialect(
        "some.instrumentation", "chat tiny", "input_tokens", "output_tokens", "cache_read.input_tokens",
        more={"gen_ai.request.model": "tiny", "gen_ai.operation.name": "chat"},
    ),
}  # fmt: skip


class Served(NamedTuple):
    """One finished request; times in nanoseconds, of the wall clock or how long."""

    arrival_unix_ns: int
    prompt: int
    output: int
    queue_ns: int
    prefill_ns: int
    first_ns: int
    decode_ns: int

    def span(self, dialect: Dialect, number: int, *, cached: int = 0) -> Span:
        """As this engine tells it; ``number`` tells requests apart, and makes random ids."""
        digest = hashlib.sha256(f"request {number}".encode()).digest()
        end_unix_ns = self.arrival_unix_ns + self.first_ns + self.decode_ns
        out = Span(
            name=dialect.name,
            trace_id=digest[:16],
            span_id=digest[16:24],
            start_time_unix_nano=self.arrival_unix_ns,
            end_time_unix_nano=end_unix_ns,
        )
        took_ns = {
            "time_to_first_token": self.first_ns,
            "e2e": self.first_ns + self.decode_ns,
            "time_in_queue": self.queue_ns,
            "time_in_model_prefill": self.prefill_ns,
            "time_in_model_decode": self.decode_ns,
            "time_in_model_inference": self.prefill_ns + self.decode_ns,
        }
        said = {f"gen_ai.latency.{name}": took_ns[name] / 1e9 for name in dialect.latencies}
        said |= {f"gen_ai.usage.{dialect.prompt}": self.prompt, f"gen_ai.usage.{dialect.output}": self.output}
        if dialect.cached:
            said[f"gen_ai.usage.{dialect.cached}"] = cached
        put(out, {**dialect.more, **said})
        return out


def served_in(copies: int = 1) -> list[Served]:
    """The requests of c10_long that ended by themselves, several times one after another, by their end."""
    found: dict[bytes, Served] = {}
    for message in payloads("c10_long"):
        for telemetry in telemetry_in(message):
            for core in telemetry.core:
                at_ns = {mark.kind: mark.ts_ns for mark in core.events}
                if core.finish not in (Finish.STOPPED, Finish.LENGTH) or SpanEventKind.QUEUED not in at_ns:
                    continue
                queued_ns, scheduled_ns = at_ns[SpanEventKind.QUEUED], at_ns[SpanEventKind.SCHEDULED]
                first_ns, last_ns = at_ns[SpanEventKind.FIRST_TOKEN], at_ns[SpanEventKind.FINISHED]
                found[core.span_id] = Served(
                    queued_ns + core.unix_minus_mono_ns,
                    core.prompt_tokens,
                    core.events[-1].output_tokens,
                    scheduled_ns - queued_ns,
                    first_ns - scheduled_ns,
                    first_ns - queued_ns,
                    last_ns - first_ns,
                )
    once = [*found.values()]
    begin_ns, end_ns = min(each.arrival_unix_ns for each in once), max(map(_end_ns, once))
    lasts_ns = math.ceil((end_ns - begin_ns) / 1e9 + 1) * 10**9
    out = [
        each._replace(arrival_unix_ns=each.arrival_unix_ns + copy * lasts_ns) for copy in range(copies) for each in once
    ]
    return sorted(out, key=_end_ns)


def _end_ns(served: Served) -> int:
    return served.arrival_unix_ns + served.first_ns + served.decode_ns


def as_told_by(dialect: Dialect, served: Sequence[Served]) -> list[Piece]:
    """The spans of one process of this engine."""
    return [Piece("server", dialect.scope, each.span(dialect, number)) for number, each in enumerate(served)]


SAMPLERS = {
    "Python, Go, Rust": lambda i: int.from_bytes(i[8:], "big") / 2**64,
    "consistent": lambda i: 1.0 - (int.from_bytes(i, "big") % 2**56) / 2**56,
}
"""What each compares with its rate, by the sources of the SDKs and of the Collector's probabilistic_sampler."""


def kept(sent: list[Piece], rate: float, sampler: str = "Python, Go, Rust") -> list[Piece]:
    """What a sampler lets through."""
    return [piece for piece in sent if SAMPLERS[sampler](piece.span.trace_id) < rate]
