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


class Engine:
    """Continuous batching: every running request in every step, prefills in order of arrival within the budget."""

    def __init__(self, step, *, prompt, output, prefix_hit, slots, budget, seed):
        self.step, self.slots, self.budget = step, slots, budget
        self.prompt, self.output = prompt, output
        self.uncached = max(1, round(prompt * (1 - prefix_hit)))
        self.draw = random.Random(seed)
        self.now_us, self.running, self.waiting, self.batches = 0.0, [], deque(), []

    def arrive(self, ahead=1.0):
        """A request with a prompt like all and an output of its own."""
        length = max(1, round(self.draw.uniform(0.5, 1.5) * self.output * ahead))
        self.waiting.append(Request(self.now_us, self.uncached, length, self.prompt - self.uncached))

    def _chunks(self, room):
        chunks = []
        prefilling = [each for each in self.running if each.prefill_left > 0]
        while room > 0 and (prefilling or (self.waiting and len(self.running) < self.slots)):
            if prefilling:
                request = prefilling.pop(0)
            else:
                request = self.waiting.popleft()
                self.running.append(request)
            chunks.append((request, min(request.prefill_left, room)))
            room -= chunks[-1][1]
        return chunks

    def advance(self):
        """One step; the requests that ended in it."""
        decoding = [each for each in self.running if each.prefill_left <= 0]
        chunks = self._chunks(self.budget - len(decoding))
        batch = len(decoding) + len(chunks)
        self.batches.append(batch)
        self.now_us += self.step(sum(tokens for _, tokens in chunks), batch, sum(each.context + 1 for each in decoding))
        for each in decoding:
            each.produced += 1
            each.context += 1
        for each, tokens in chunks:
            each.prefill_left -= tokens
            each.context += tokens
            if each.prefill_left <= 0:
                each.produced, each.first_us = 1, self.now_us
        ended = [each for each in self.running if each.prefill_left <= 0 and each.produced >= each.output]
        for each in ended:
            self.running.remove(each)
        return ended


def run(step, *, concurrency, prompt, output, prefix_hit=0.0, slots=10**9, budget=10**9, finished=600, seed=1):
    """Equal prompts, outputs spread evenly over ±50 % so that phases do not stay in step.

    Args:
        step: (prefill_tokens, requests, decode_context_tokens) -> us.
        finished: requests after which it ends; the first quarter of them is warm-up.
    """
    engine = Engine(step, prompt=prompt, output=output, prefix_hit=prefix_hit, slots=slots, budget=budget, seed=seed)
    for _ in range(concurrency):
        engine.arrive(engine.draw.random())
    done = []
    while len(done) < finished:
        for each in engine.advance():
            done.append((each, engine.now_us))
            engine.arrive()
    kept = done[finished // 4 :]
    gaps = sum(end - each.first_us for each, end in kept)
    return Truth(
        sum(each.first_us - each.arrived_us for each, _ in kept) / len(kept),
        gaps / max(1, sum(each.output - 1 for each, _ in kept)),
        sum(end - each.arrived_us for each, end in kept) / len(kept),
        (len(kept) - 1) / max(kept[-1][1] - kept[0][1], 1.0) * 1e6,
        sum(engine.batches) / len(engine.batches),
    )
