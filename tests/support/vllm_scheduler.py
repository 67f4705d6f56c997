"""vLLM's scheduler as a discrete-event simulation: who is in which step, when each step ends, what each request sees.

The rules are those of vLLM's V1 engine. Each step has a budget of tokens. Requests that run come first, in the order
of their admission: one token for each that decodes, the rest of its prompt (or as much as the budget allows) for each
that prefills. What is left of the budget admits waiting requests, as long as fewer than ``max_num_seqs`` run and the
KV cache has blocks. Without a free block the request that was admitted last is preempted and recomputed.

Synchronous: the loop takes in what arrived, schedules, waits for the step, hands out its tokens. Asynchronous: the loop
schedules a step while the one before runs, so that an arrival waits for the end of the running step *and* for the
whole next one. How long a step computes is the business of a :data:`StepTimes`; the host adds its own times.

Times are integer nanoseconds of one clock that starts at 0.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_SIZE = 16
NEVER = 1 << 62


class Work(NamedTuple):
    """What one step computes; a request decodes when its prompt is computed and one token is scheduled."""

    prefill_tokens: int = 0
    prefill_requests: int = 0
    prefill_context: int = 0
    """Tokens that the prefilling requests had computed before."""
    decodes: int = 0
    decode_context: int = 0
    """Tokens that the decoding requests had computed before."""


StepTimes = Callable[[Work], float]
"""Microseconds that a step computes, without noise."""


class Limits(NamedTuple):
    """vLLM's settings of the same names; ``kv_blocks`` as counted when it starts."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int = 25_000
    asynchronous: bool = True


class Host(NamedTuple):
    """Microseconds of the CPU, assumed: what schedule() and update_from_output() take, what lies before a kernel.

    ``api_us`` and ``api_us_per_token`` pass between a client's request and the engine's queue, ``answer_us`` between
    the engine's token and the client. ``noise`` is the spread of a step's time, log-normal with a memory of one step;
    ``stall_share`` of the steps take ``stall_us`` longer.
    """

    schedule_us: float = 120.0
    output_us: float = 150.0
    per_request_us: float = 2.0
    launch_us: float = 60.0
    api_us: float = 1_200.0
    api_us_per_token: float = 0.5
    answer_us: float = 400.0
    noise: float = 0.01
    stall_share: float = 3e-4
    stall_us: tuple[float, float] = (4_000.0, 25_000.0)


@dataclass(slots=True, eq=False)
class Request:
    """One request and what happened to it."""

    number: int
    sent: int
    prompt: int
    output: int
    client: int = -1
    """Which client of a closed loop waits for it; -1: none."""
    received: int = 0
    queued: int = 0
    scheduled: int = 0
    first: int = 0
    last: int = 0
    first_seen: int = 0
    last_seen: int = 0
    computed: int = 0
    expected: int = 0
    """Output tokens that were made or will be by steps already scheduled."""
    made: int = 0
    blocks: int = 0
    token_at: int = 0


@dataclass(slots=True)
class Step:
    """One call of schedule() and what became of it."""

    number: int
    start: int
    scheduled: int
    output: int = 0
    done: int = 0
    mean_us: float = 0.0
    """What the step takes an engine that is busy, without noise and stalls."""
    work: Work = field(default_factory=Work)
    plan: list[tuple[Request, int, bool]] = field(default_factory=list, repr=False)
    """Request, tokens, whether its next output token comes of this step; forgotten when the step is over."""
    unanswered: int = 0
    """Requests in it without an output token, and their tokens: what vLLM's own counts call prefill."""
    unanswered_tokens: int = 0
    several: int = 0
    """Requests with more than one token in the step, their tokens, and their context after it."""
    several_tokens: int = 0
    several_context: int = 0
    context: int = 0
    """Tokens computed after the step, of all requests in it."""
    pairs: int = 0
    prompt_variance: float = 0.0
    context_variance: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    finished: int = 0
    preempted: int = 0
    free_blocks: int = 0
    generated: int = 0
    """Output tokens handed out when it was over, and the requests that got their first one or ended."""
    started: list[Request] = field(default_factory=list, repr=False)
    ended: list[Request] = field(default_factory=list, repr=False)
    gaps: dict[int, int] = field(default_factory=dict, repr=False)
    """Nanoseconds since the token before, and how many requests waited so long."""


class Traffic:
    """Requests to come, by the time at which their clients send them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._loops: list[Callable[[int], tuple[int, int, int] | None]] = []
        self._count = 0

    def send(self, at: int, prompt: int, output: int, client: int = -1) -> None:
        """One request at that time."""
        heapq.heappush(self._heap, (at, self._count, max(prompt, 1), max(output, 1), client))
        self._count += 1

    def poisson(self, start: int, stop: int, per_s: float, prompt: float, output: float) -> None:
        """Independent arrivals between two times, with sizes spread around the means."""
        at = start + int(self.rng.expovariate(per_s) * 1e9)
        while at < stop:
            self.send(at, *self.sizes(prompt, output, 0.5))
            at += int(self.rng.expovariate(per_s) * 1e9)

    def closed(
        self, start: int, stop: int, clients: int, prompt: float, output: float, spread: float, think_s: float
    ) -> None:
        """So many clients, each of which sends when it has its answer and has thought; they begin one by one."""

        def again(now: int) -> tuple[int, int, int] | None:
            at = now + int(think_s and self.rng.expovariate(1.0 / think_s) * 1e9)
            return (at, *self.sizes(prompt, output, spread)) if at < stop else None

        self._loops.append(again)
        for number in range(clients):
            self.send(start + number * 20_000_000, *self.sizes(prompt, output, spread), len(self._loops) - 1)

    def sizes(self, prompt: float, output: float, spread: float) -> tuple[int, int]:
        """Prompt and output tokens, log-normal with these means."""
        shift = spread * spread / 2.0
        prompt, output = (mean * math.exp(self.rng.gauss(-shift, spread)) for mean in (prompt, output))
        return max(1, round(prompt)), max(1, round(output))

    def answered(self, request: Request) -> None:
        """A client has its answer; one of a closed loop sends again."""
        if request.client >= 0 and (following := self._loops[request.client](request.last_seen)) is not None:
            self.send(*following, request.client)

    def next_at(self) -> int:
        """When the next one is sent, or never."""
        return self._heap[0][0] if self._heap else NEVER

    def take(self, number: int) -> Request:
        """The next one."""
        at, _, prompt, output, client = heapq.heappop(self._heap)
        return Request(number, at, prompt, output, client)


class Engine:
    """One engine. ``run`` it; ``steps`` and ``requests`` (those that ended) are the truth."""

    def __init__(
        self,
        step_times: StepTimes,
        traffic: Traffic,
        limits: Limits | None = None,
        host: Host | None = None,
        seed: int = 1,
    ) -> None:
        self.limits, self.host = limits or Limits(), host or Host()
        self.steps: list[Step] = []
        self.requests: list[Request] = []
        self._times, self._traffic = step_times, traffic
        self._rng = random.Random(seed)
        self._coming: list[tuple[int, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._free = self.limits.kv_blocks
        self._finished = self._preempted = self._sent = 0
        self._wander = 0.0

    # ---------------------------------------------------------------- the loop

    def run(self, until: int) -> Engine:
        """Serve until then."""
        now, kernels_free = 0, 0
        in_flight: deque[Step] = deque()
        depth = 2 if self.limits.asynchronous else 1
        while now < until:
            self._take_in(now)
            if self._running or self._waiting or self._finished:
                step = self._schedule(now)
                now, kernels_free = self._launch(step, kernels_free)
                in_flight.append(step)
                if step.plan and len(in_flight) < depth:
                    continue
            if in_flight:
                now = self._hand_out(in_flight.popleft(), now)
            else:
                following = min(self._traffic.next_at(), self._coming[0][0] if self._coming else NEVER)
                if following == NEVER:
                    break
                now = max(now, following)
        return self

    def _take_in(self, now: int) -> None:
        """Requests sent by now are on their way to the queue; those that have arrived are put there."""
        while self._traffic.next_at() <= now:
            request = self._traffic.take(self._sent)
            self._sent += 1
            us = self.host.api_us * self._rng.uniform(0.8, 1.2) + self.host.api_us_per_token * request.prompt
            request.received = request.sent + int(us * 1e3)
            heapq.heappush(self._coming, (request.received, request.number, request))
        while self._coming and self._coming[0][0] <= now:
            request = heapq.heappop(self._coming)[2]
            request.queued = now
            self._waiting.append(request)

    def _launch(self, step: Step, kernels_free: int) -> tuple[int, int]:
        """When the loop goes on, and when the step has been computed."""
        host = self.host
        scheduled = step.start + int((host.schedule_us + host.per_request_us * len(step.plan)) * 1e3)
        step.scheduled = scheduled
        if not step.plan:
            step.output = scheduled
            return scheduled, kernels_free
        us = self._times(step.work)
        self._wander = 0.5 * self._wander + self._rng.gauss(0.0, host.noise * math.sqrt(0.75))
        taken_us = us * math.exp(self._wander)
        if self._rng.random() < host.stall_share:
            taken_us += self._rng.uniform(*host.stall_us)
        around_us = host.schedule_us + host.output_us + 2.0 * host.per_request_us * len(step.plan)
        step.mean_us = us + host.launch_us
        step.mean_us = max(step.mean_us, around_us) if self.limits.asynchronous else step.mean_us + around_us
        step.output = max(scheduled, kernels_free) + int((host.launch_us + taken_us) * 1e3)
        return scheduled, step.output

    # ---------------------------------------------------------------- who is in a step

    def _schedule(self, now: int) -> Step:
        step = Step(len(self.steps) + 1, now, now)
        budget = self.limits.max_num_batched_tokens
        place = 0
        while place < len(self._running) and budget > 0:
            request = self._running[place]
            place += 1
            if request.expected >= request.output:
                continue  # its last token is on the way
            tokens = min(request.prompt + request.expected - request.computed, budget)
            room = self._allocate(request, tokens)
            while not room and self._preempt(request):
                room = self._allocate(request, tokens)
            if not room:
                break  # it was the last one, and is preempted itself
            step.plan.append((request, tokens, _advance(request, tokens)))
            budget -= tokens
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs and not self._preempted:
            request = self._waiting[0]
            tokens = min(request.prompt + request.expected - request.computed, budget)
            if not self._allocate(request, tokens):
                break
            self._running.append(self._waiting.popleft())
            request.scheduled = request.scheduled or now
            step.plan.append((request, tokens, _advance(request, tokens)))
            budget -= tokens
        self._describe(step)
        self.steps.append(step)
        return step

    def _allocate(self, request: Request, tokens: int) -> bool:
        wanted = -(-(request.computed + tokens) // BLOCK_SIZE) - request.blocks
        if wanted > self._free:
            return False
        self._free -= wanted
        request.blocks += wanted
        return True

    def _preempt(self, request: Request) -> bool:
        """Take the last one's blocks; whether somebody else's."""
        last = self._running.pop()
        self._free += last.blocks
        last.blocks = last.computed = 0
        self._waiting.appendleft(last)
        self._preempted += 1
        return last is not request

    def _describe(self, step: Step) -> None:
        """Sum up the batch, and the queues behind it."""
        lengths, contexts = [], []
        prefill_tokens = prefill_context = 0
        for request, tokens, _ in step.plan:
            after = request.computed
            before = after - tokens
            if tokens == 1 and before >= request.prompt:
                contexts.append(before)
            else:
                lengths.append(request.prompt)
                prefill_tokens += tokens
                prefill_context += before
            if not request.made:
                step.unanswered += 1
                step.unanswered_tokens += tokens
            if tokens > 1:
                step.several += 1
                step.several_tokens += tokens
                step.several_context += after
            step.pairs += tokens * before + tokens * (tokens + 1) // 2
        decode_context = sum(contexts)
        step.work = Work(prefill_tokens, len(lengths), prefill_context, len(contexts), decode_context)
        step.context = decode_context + len(contexts) + prefill_context + prefill_tokens
        step.prompt_variance, step.context_variance = _variance(lengths), _variance(contexts)
        step.running, step.waiting = len(self._running), len(self._waiting)
        step.waiting_tokens = sum(request.prompt for request in self._waiting)
        step.finished, self._finished = self._finished, 0
        step.preempted, self._preempted = self._preempted, 0
        step.free_blocks = self._free

    # ---------------------------------------------------------------- what comes of it

    def _hand_out(self, step: Step, now: int) -> int:
        """Wait for the step and count its tokens; when the loop goes on."""
        step.output = max(step.output, now)
        step.done = step.output + int((self.host.output_us + self.host.per_request_us * len(step.plan)) * 1e3)
        seen = step.done + int(self.host.answer_us * 1e3)
        for request, _, gives in step.plan:
            if not gives:
                continue
            request.made += 1
            step.generated += 1
            if request.made == 1:
                request.first, request.first_seen = step.done, seen
                step.started.append(request)
            else:
                gap = step.done - request.token_at
                step.gaps[gap] = step.gaps.get(gap, 0) + 1
            request.token_at = step.done
            if request.made >= request.output:
                self._end(step, request, seen)
        step.plan = []
        return step.done

    def _end(self, step: Step, request: Request, seen: int) -> None:
        request.last, request.last_seen = step.done, seen
        step.ended.append(request)
        self.requests.append(request)
        if request in self._running:
            self._running.remove(request)
        else:  # it was preempted while its last token was on the way
            self._waiting.remove(request)
        self._free += request.blocks
        request.blocks = 0
        self._finished += 1
        self._traffic.answered(request)


def _advance(request: Request, tokens: int) -> bool:
    """Count tokens as computed, as vLLM does when it schedules them; whether an output token comes of them."""
    request.computed += tokens
    gives = request.computed == request.prompt + request.expected
    request.expected += gives
    return gives


def _variance(values: list[int]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return max(0.0, sum([value * value for value in values]) / len(values) - mean * mean)
