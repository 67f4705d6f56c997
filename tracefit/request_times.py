"""TTFT, ITL and E2E of a request, their bands, and whether one may rely on them.

closed_loop.py has the law and its letters: of N requests in flight n are in the batch, S' slots at most; each has P
prompt tokens, of which p are computed, and O output tokens; a step has T tokens, and a prompt takes q chunks.

    TTFT = api_queueing + first_response + the first token by closed_loop.py
    E2E  = TTFT + (O - 1) ITL + post_decode
    rate = N / (E2E + t')                      requests per second (Little's law); t' is t without what E2E has of it

**Bands.** Reasons to be off that do not depend on each other are added as squares:

* what single steps and the API server took, of one in ten below and above;
* where nobody surely says whether the engine schedules a step ahead, TTFT if it is otherwise. What ``api_queueing`` has
  of such a step is not in it then;
* where rows are means, which hardly tell steps with one prompt: ONE_STEP of those of the own prompt, and of all others,
  in TTFT and in ITL, as much of it as steps have a prompt;
* where prompts wait for tokens, for how long depends on how sizes spread: _QUEUE_OFF of that part of k V;
* outside of what was seen, and where rows are means, for the answer rests on the coefficients then: their errors
  (step_model.py), of a step of the prompt for TTFT, of a mean step for ITL.

Requests whose sizes are all the same gather until they arrive together. TTFT's band is that of sizes that differ, and
does not hold that. ITL's lower end does: with g = min(n p, T) tokens of prompts in one step, which takes
full = step(g, n, (n - g / p) P),

    ITL >= s_0 + (full - s_0) (n p / T - 1) / 2 (O - 1)

Where a request waits and prefills in as many steps as it decodes in, or more (O - 1 <= k + w), and its ITL may be half
as long, the answer names output_tokens and is not usable: it meets some of the prompts, and nobody says which.

Nor does anybody say how sizes spread. Where not all fit the KV cache at their full length, some may wait for memory or
be preempted: the answer names kv_tokens, and TTFT's upper end has the wait of all but n' = K / (P + O), which is
(N / n' - 1) R. More than S' that are limited by memory do wait, and are preempted and computed again, which is in no
coefficient: such an answer is not usable. Where prefills fill every step hardly anybody decodes, and memory that is
taken does not grow.

A budget T that nobody told is taken to be 2,048, or enough for 2 n. Where it decides, for prompts are longer or several
share a step (k > _BUDGET_DECIDES), the answer names it, and is not usable. So it is for prompts of more than T +
ATTENTION_TOKENS: what their chunks pay for those before is in no coefficient. Where the engine cuts no prompts (fact
enable_chunked_prefill), k > _BUDGET_DECIDES names the budget, too: each waits for a step that holds all of it. With
speculative decoding a step gives an answer several tokens, and nobody says how many: that is named as well.

What it leaves out: requests of different size share one mean, so a mix of a few very long prompts with short ones is
seen too smooth; preemption.

Microseconds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .closed_loop import ClosedLoop, Met, Prefills, Workload, ends
from .document import Coefficient, ConfigDocument, Target
from .exceptions import REQUESTS_MAX, BadInputError, checked
from .shapes import Band, together, unsure
from .step_model import StepModel

ONE_STEP = 0.15
"""How far off the steps of a prompt are by coefficients that were learned from means of many; outside, twice as far."""
ATTENTION_TOKENS = 4096.0
"""So much longer than a step may a prompt be: the attention of its chunks to those before is in no coefficient."""
_BUDGET_DECIDES = 1.05
"""More steps of a prefill than this, where one step would do: others take part of its tokens, or there are too few."""
_QUEUE_OFF = 0.25
"""Of the steps in which other prompts take the tokens: as far off by how sizes spread, for eight in ten loops."""
_KNOWN_WITHIN = 2.0
"""ITL of short answers is usable where requests that gather have at least so large a part of it."""
_Z_80 = 1.28
"""Standard errors of half an 80 % interval."""
TURNAROUND_US = 2_000.0
"""From a client's last token to its next request in the queue, where the API server's part is not known: assumed, a
millisecond each way."""


class Estimate(NamedTuple):
    """A time in microseconds with its band."""

    us: float
    low: float
    high: float

    @property
    def ms(self) -> float:
        """The middle, in milliseconds."""
        return self.us / 1e3


class RequestEstimate(NamedTuple):
    """What requests see at one load.

    Attributes:
        concurrency: requests in flight; ``running`` of them wait for no slot: in the batch, or in the next one.
        ttft, itl, e2e: mean times; ``itl`` is 0 for a single output token.
        requests_per_s, output_tokens_per_s: of the whole engine.
        prefill_bound: prefills fill every step, so that more requests only wait longer.
        extrapolated, usable: as for a step.
    """

    concurrency: float
    running: float
    ttft: Estimate
    itl: Estimate
    e2e: Estimate
    requests_per_s: float
    output_tokens_per_s: float
    prefill_bound: bool
    extrapolated: tuple[str, ...]
    usable: bool


_Step = tuple[float, float, float]
"""Prefill tokens, requests and tokens of decode context of a mean step."""


class _Off(NamedTuple):
    """Microseconds that TTFT and ITL may be off; and a step of the own prompt, in parts of it."""

    ttft_us: float
    itl_us: float
    of_own_step: float


class RequestTimes:
    """The formulas of the module's docstring on one configuration."""

    def __init__(self, steps: StepModel, config: ConfigDocument) -> None:
        facts = config.facts
        self.steps = steps
        self._config = config
        self._speculates = facts.get("speculative_decoding", False) not in (False, "none")  # a rule may tell the method
        self._whole_prompts = facts.get("enable_chunked_prefill") is False
        self._ahead = _Ahead.of(config)
        self._loop = ClosedLoop(steps, ahead=self._ahead.is_so)
        self._otherwise = ClosedLoop(steps, ahead=not self._ahead.is_so)

    def slots(self, work: Workload) -> tuple[float, str]:
        """Requests that run at the same time at most, and which limit says so; inf where nobody said.

        Raises:
            BadInputError: not even one does.
        """
        _, token_budget, kv_tokens = self.steps.limits
        slots = self.steps.requests_max
        name = "max_num_seqs" if slots < math.inf else "none"
        if kv_tokens is not None and slots * (work.prompt + work.output) > kv_tokens:  # else all fit at their longest
            held = work.kv_requests_max(kv_tokens)
            slots, name = (held, "kv_capacity") if held < slots else (slots, name)
        if token_budget is not None and token_budget - 1 < slots:
            slots, name = float(token_budget - 1), "token_budget"
        if slots < 1.0:
            raise BadInputError("prompt_tokens", f"not even one such request fits the engine ({name})")
        return slots, name

    def estimate(self, work: Workload, concurrency: object) -> RequestEstimate:
        """What ``concurrency`` requests in flight see."""
        in_flight = checked("concurrency", concurrency, 1.0, REQUESTS_MAX)
        (slots, limit), tokens = self.slots(work), work.output - 1.0
        running = min(slots, in_flight)
        queueing = _outside_time(self._config, "api_queueing", "prompt_tokens", work.prompt)
        response = _outside_time(self._config, "first_response", "", 0.0)
        after = _outside_time(self._config, "post_decode", "output_tokens", work.output)
        api = together(queueing, response)
        turnaround_us = max(TURNAROUND_US, api[0])
        at, first_token = self._met(work, in_flight, slots, turnaround_us)
        ttft = together(first_token, api)
        e2e = together(ends(lambda first, step: first + tokens * step, ttft, at.itl), after)
        per_s = 1e6 * in_flight / (e2e[0] + turnaround_us - api[0])
        least_us, memory_us = self._gathered_itl(work, running), self._memory_us(work, in_flight, at)

        refused, waits = self._refused(work, running, at, least_us), list[str]()
        if memory_us:
            (refused if limit == "kv_capacity" and in_flight > slots else waits).append("kv_tokens")
        prefills = Prefills(running, work.output, work.uncached, self.steps.budget_of(running))
        both = self._mean_steps(prefills, work, at.k)
        met = both[1:] if self.steps.of_means else both if tokens else both[:1]
        seen = (name for step in met for name in self.steps.outside(*step))
        outside = tuple(dict.fromkeys((*refused, *seen)))
        usable = self.steps.usable(outside, *met[0]) and not refused

        off = self._off(prefills, both, at, ttft[0], tokens, is_outside=bool(outside))
        first, between = Estimate(*unsure(ttft, off.ttft_us)), Estimate(*unsure(at.itl, off.itl_us))
        return RequestEstimate(
            in_flight,
            running,
            first._replace(high=max(first.high, api[0] + (1.0 + off.of_own_step) * memory_us)),
            between._replace(low=min(between.low, least_us)) if tokens else Estimate(0.0, 0.0, 0.0),
            Estimate(*unsure(e2e, off.ttft_us + tokens * off.itl_us)),
            per_s,
            per_s * work.output,
            at.load > 1.0,
            (*outside, *waits),
            usable,
        )

    def _met(self, work: Workload, in_flight: float, slots: float, turnaround_us: float) -> tuple[Met, Band]:
        """What is met, and the first token; where it is not known whether steps are ahead, its band holds both."""
        at, first_token = self._loop.met(work, in_flight, slots, turnaround_us)
        if self._ahead.is_known:
            return at, first_token
        _, otherwise = self._otherwise.met(work, in_flight, slots, turnaround_us)
        off_us = otherwise[0] - first_token[0] + self._ahead.in_api_us
        return at, together(first_token, (0.0, min(off_us, 0.0), max(off_us, 0.0)))

    def _off(
        self, prefills: Prefills, both: tuple[_Step, _Step], at: Met, ttft_us: float, tokens: float, *, is_outside: bool
    ) -> _Off:
        """How far the answer is off for other reasons than the spread of steps; ``tokens``: O - 1."""
        of_means = self.steps.of_means
        own, others = (self.steps.spread(*step) if is_outside or of_means else 0.0 for step in both)
        one_step = (2.0 if is_outside else 1.0) * ONE_STEP * of_means
        with_prompt = min(prefills.requests * at.k / (at.k + tokens), 1.0)  # of the steps
        of_prompts_us = one_step * (at.own[0] + with_prompt * (ttft_us - at.own[0]))
        queued_us = _QUEUE_OFF * max(1.0 - prefills.chunks / at.k, 0.0) * at.own[0]
        return _Off(
            math.hypot(own * ttft_us, of_prompts_us, queued_us),
            math.hypot(others, one_step * with_prompt) * at.itl[0],
            math.hypot(own, one_step),
        )

    def _memory_us(self, work: Workload, in_flight: float, at: Met) -> float:
        """The first token, at the latest, where requests wait for memory: (N / n' - 1) R and its prefill; else 0."""
        kv_tokens = self.steps.limits.kv_tokens
        fit = math.inf if kv_tokens is None else kv_tokens / (work.prompt + work.output)
        if at.load > 1.0 or min(in_flight, self.steps.requests_max) <= fit:
            return 0.0
        return at.own[0] + (in_flight / fit - 1.0) * (at.own[0] + (work.output - 1.0) * at.itl[0])

    def _refused(self, work: Workload, running: float, at: Met, least_us: float) -> list[str]:
        """What is in no coefficient, or nobody said; ``least_us``: ITL of requests that gather."""
        budget = self.steps.limits.max_num_batched_tokens
        doubts = {
            "output_tokens": 1.0 < work.output <= 1.0 + at.k + at.away and _KNOWN_WITHIN * least_us < at.itl[0],
            "prompt_tokens": work.prompt > self.steps.budget_of(running) + ATTENTION_TOKENS,
            "max_num_batched_tokens": at.k > _BUDGET_DECIDES and (budget is None or self._whole_prompts),
            "speculative_decoding": self._speculates,
        }
        return [name for name, is_so in doubts.items() if is_so]

    def _mean_steps(self, prefills: Prefills, work: Workload, k: float) -> tuple[_Step, _Step]:
        """A step of the own prompt, and one that others wait for: where rows are means a mean one, else a decode."""
        decodes, running, others = work.output - 1.0, prefills.requests, prefills.mean()
        of_own, of_others = (work.uncached * prefills.ended(j) for j in (others + 1.0, others))
        batch = running, running * work.context * decodes / (k + decodes)
        return (of_own, *batch), (of_others if self.steps.of_means else 0.0, *batch)

    def _gathered_itl(self, work: Workload, running: float) -> float:
        """ITL, at least, of loops whose requests gather."""
        steps, budget = self.steps, self.steps.budget_of(running)
        _, low, _ = steps.band(0.0, running, running * work.context, mean=True)
        if running <= 1.0:
            return low
        tokens = min(running * work.uncached, budget)
        full_context = max(running - tokens / work.uncached, 0.0) * work.prompt
        _, full_low, _ = steps.band(tokens, running, full_context, mean=True)
        full = min(0.5 * (running * work.uncached / budget - 1.0) / max(work.output - 1.0, 1.0), 1.0)
        return low + max(full, 0.0) * max(full_low - low, 0.0)


class _Ahead(NamedTuple):
    """Whether the engine schedules a step ahead.

    ``is_known``: the engine said it, or waits of requests surely speak for none. ``in_api_us``: how much of
    ``api_queueing`` is a step that waits speak for.
    """

    is_so: bool
    is_known: bool
    in_api_us: float

    @classmethod
    def of(cls, config: ConfigDocument) -> _Ahead:
        """As the engine said, else as waits make likely."""
        queueing, said = config.targets.get("api_queueing"), config.scheduled_ahead
        waits_us, intercept = queueing and queueing.step_ahead_us, _coefficient(queueing, "intercept")
        in_api_us = min(waits_us or 0.0, intercept.value if intercept is not None else 0.0)
        return cls(bool(waits_us) if said is None else said, said is not None or waits_us == 0.0, in_api_us)


def _outside_time(config: ConfigDocument, name: str, feature: str, tokens: float) -> Band:
    """A time outside of the steps, of a request with so many tokens of its kind; 0 where none was learned.

    Its band is that of its rows, and at least that of its intercept: what stands in for rows has no other. Where nobody
    told either, it may be off by itself.
    """
    target = config.targets.get(name)
    intercept, per_token = (_coefficient(target, each) for each in ("intercept", feature))
    if target is None or intercept is None:
        return 0.0, 0.0, 0.0
    base_us = max(intercept.value - (target.step_ahead_us or 0.0), 0.0)  # that step is simulated
    us = base_us + (tokens * per_token.value if per_token is not None else 0.0)
    p10, p90 = target.interval.pooled if target.interval is not None else (1.0, 1.0)
    off_us = us * (target.interval is None) if intercept.stderr is None else _Z_80 * intercept.stderr
    return us, max(min(us * p10, us - off_us), 0.0), max(us * p90, us + off_us)


def _coefficient(target: Target | None, name: str) -> Coefficient | None:
    model = None if target is None else target.models.get("portable")
    return None if model is None else next((each for each in model.coefficients if each.name == name), None)
