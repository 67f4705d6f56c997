"""Pages as vLLM would have served them while a recording was made: its steps run through vLLM's counters again.

What a page cannot have from a recording, it has as if every step's time had been the latency of each of its decoding
requests, which is a little kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collector.decode import CoreSpan, SpanEventKind
from collector.decode.pages import EngineReading, Flavour, Meaning, ScrapedPage
from online import STEP_FEATURES, RowBlock
from tests.support.recordings import messages
from tests.support.toy_spans import telemetry_in

_NATURAL = {"stopped", "length"}


@dataclass(frozen=True)
class Events:
    """Sorted times (unix ns) and the amounts that a counter grows by at each."""

    at_ns: np.ndarray
    sums: dict[Meaning, np.ndarray]

    @staticmethod
    def of(at_ns, **amounts):
        order = np.argsort(at_ns, kind="stable")
        sums = {
            Meaning[k.upper()]: np.concatenate(([0.0], np.cumsum(np.asarray(v, float)[order])))
            for k, v in amounts.items()
        }
        return Events(np.asarray(at_ns)[order], sums)

    def until(self, unix_ns):
        index = int(np.searchsorted(self.at_ns, unix_ns, side="right"))
        return {meaning: float(sums[index]) for meaning, sums in self.sums.items()}


def requests_of(path: Path):
    for payload in messages(path):
        for telemetry in telemetry_in(payload):
            yield from telemetry.core


def pages_of(spans: Iterable[CoreSpan], rows: RowBlock, every_s: float) -> list[ScrapedPage]:
    """What a scrape every so often would have found."""
    column = {name: rows.raw[:, i] for i, name in enumerate(STEP_FEATURES)}
    steps = rows.steps
    pace_us = np.repeat(rows.elapsed_us / steps, steps)
    position = np.arange(len(rows.raw)) - np.repeat(rows.offsets[:-1], steps)
    # the row's end is the stamp of its last boundary
    end_ns = np.repeat(rows.end_ns, steps) - (np.repeat(steps, steps) - 1 - position) * (pace_us * 1e3).astype(np.int64)
    decoding = np.nan_to_num(column["decode_requests"])

    first_ns, first_prompt, done_ns, done_prompt, done_output, in_ns, out_ns = [], [], [], [], [], [], []
    for span in spans:
        marks = {}
        for mark in span.events:
            marks.setdefault(mark.kind, mark.ts_ns + span.unix_minus_mono_ns)
        last_ns = span.events[-1].ts_ns + span.unix_minus_mono_ns
        if SpanEventKind.SCHEDULED not in marks:
            continue
        in_ns.append(marks[SpanEventKind.SCHEDULED])
        out_ns.append(last_ns)
        if SpanEventKind.FIRST_TOKEN in marks:
            first_ns.append(marks[SpanEventKind.FIRST_TOKEN])
            first_prompt.append(span.prompt_tokens)
            if span.finish in _NATURAL:
                done_ns.append(last_ns)
                done_prompt.append(span.prompt_tokens)
                done_output.append(span.events[-1].output_tokens)

    order = np.sort(end_ns)

    # All are recorded when the step that did them is over: move every event to the next end of a step.
    def settled(at_ns):
        return order[np.minimum(np.searchsorted(order, np.asarray(at_ns) - 2_000_000), len(order) - 1)]

    first_ns, done_ns, out_ns = settled(first_ns), settled(done_ns), settled(out_ns)
    computed = _credited(end_ns, np.nan_to_num(column["prefill_tokens"]), first_ns)
    stepped = Events.of(
        end_ns,
        steps=np.ones(len(end_ns)),
        itl_count=decoding,
        itl_seconds=decoding * pace_us / 1e6,
        generated_tokens=decoding,
    )
    credited = Events.of(end_ns, step_tokens=computed + decoding)
    started = Events.of(first_ns, first_tokens=np.ones(len(first_ns)), prompt_tokens=first_prompt)
    ended = Events.of(
        done_ns,
        finished=np.ones(len(done_ns)),
        finished_prompt_tokens=done_prompt,
        finished_generated_tokens=done_output,
    )
    entered, left = Events.of(in_ns, running=np.ones(len(in_ns))), Events.of(out_ns, running=np.ones(len(out_ns)))
    out = []
    for at_ns in np.arange(order[0], order[-1], int(every_s * 1e9)):
        recorded_ns = int(order[max(0, np.searchsorted(order, at_ns, side="right") - 1)])
        values = [np.nan] * len(Meaning)
        for events in (stepped, credited, started, ended):
            for meaning, value in events.until(recorded_ns).items():
                values[meaning] = value
        values[Meaning.GENERATED_TOKENS] += values[Meaning.FIRST_TOKENS]
        values[Meaning.STEP_TOKENS] += values[Meaning.FIRST_TOKENS]
        running = entered.until(recorded_ns)[Meaning.RUNNING] - left.until(recorded_ns)[Meaning.RUNNING]
        values[Meaning.RUNNING] = running
        values[Meaning.WAITING] = values[Meaning.PREEMPTIONS] = 0.0
        values[Meaning.KV_USAGE_RATIO] = values[Meaning.PREFIX_HIT_TOKENS] = 0.0
        reading = EngineReading("0", "replayed", Flavour.VLLM, tuple(values), {})
        out.append(ScrapedPage("replayed", int(at_ns), int(at_ns), (reading,)))
    return out


def _credited(end_ns, prefill, first_ns):
    """Prompt tokens at the step in which a first token came: a prompt in chunks is credited with its last one."""
    out = np.zeros(len(prefill))
    has_first = np.isin(end_ns, first_ns)
    held = 0.0
    for i in np.argsort(end_ns, kind="stable"):
        held += prefill[i]
        if has_first[i]:
            out[i], held = held, 0.0
    return out
