"""An engine stepped request by request in a closed loop: the truth that mean values are held against."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


@dataclass
class Request:
    """One request in flight."""

    arrived_us: float
    prefill_left: float
    output: int
    context: float
    produced: int = 0
    first_us: float = 0.0


@dataclass
class Truth:
    """Mean times in microseconds, throughput per second, and the mean batch."""

    ttft_us: float
    itl_us: float
    e2e_us: float
    requests_per_s: float
    running: float


def run(step, *, concurrency, prompt, output, prefix_hit=0.0, slots=10**9, budget=10**9, finished=600, seed=1):
    """Equal prompts, outputs spread evenly over ±50 % so that phases do not stay in step.

    Args:
        step: (prefill_tokens, requests, decode_context_tokens) -> us.
        finished: requests after which it ends; the first quarter of them is warm-up.
    """
    draw = random.Random(seed)
    uncached = max(1, round(prompt * (1 - prefix_hit)))
    now_us, running, waiting, done, batches = 0.0, [], deque(), [], []

    def arrive(at_us, ahead=1.0):
        length = max(1, round(draw.uniform(0.5, 1.5) * output * ahead))
        waiting.append(Request(at_us, uncached, length, prompt - uncached))

    for _ in range(concurrency):
        arrive(0.0, draw.random())
    while len(done) < finished:
        room, prefill, context = budget, 0.0, 0.0
        for each in running:
            if each.prefill_left <= 0:
                room -= 1
                context += each.context + 1
        chunks = []
        for each in running:
            if each.prefill_left > 0 and room > 0:
                chunks.append((each, min(each.prefill_left, room)))
                room -= chunks[-1][1]
        while waiting and len(running) < slots and room > 0 and waiting[0].arrived_us <= now_us:
            running.append(waiting.popleft())
            chunks.append((running[-1], min(running[-1].prefill_left, room)))
            room -= chunks[-1][1]
        prefill = sum(tokens for _, tokens in chunks)
        decoding = [each for each in running if each.prefill_left <= 0]
        batches.append(len(decoding) + len(chunks))
        now_us += step(prefill, len(decoding) + len(chunks), context)
        for each in decoding:
            each.produced += 1
            each.context += 1
        for each, tokens in chunks:
            each.prefill_left -= tokens
            each.context += tokens
            if each.prefill_left <= 0:
                each.produced, each.first_us = 1, now_us
        for each in [each for each in running if each.prefill_left <= 0 and each.produced >= each.output]:
            running.remove(each)
            done.append((each, now_us))
            arrive(now_us)
    kept = done[finished // 4 :]
    gaps = sum(end - each.first_us for each, end in kept)
    return Truth(
        sum(each.first_us - each.arrived_us for each, _ in kept) / len(kept),
        gaps / max(1, sum(each.output - 1 for each, _ in kept)),
        sum(end - each.arrived_us for each, end in kept) / len(kept),
        (len(kept) - 1) / (kept[-1][1] - kept[0][1]) * 1e6,
        sum(batches) / len(batches),
    )
