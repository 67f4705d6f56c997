"""TTFT, ITL and E2E of a request, their bands, and whether one may rely on them.

closed_loop.py has the law and its letters: of N requests in flight n are in the batch, S' slots at most; each has P
prompt tokens, of which p are computed, and O output tokens; a step has T tokens, and a prompt takes q chunks.

    TTFT = api_queueing + first_response + the first token by closed_loop.py
    E2E  = TTFT + (O - 1) ITL + post_decode
    rate = N / (E2E + t')                      requests per second (Little's law); t' is t without what E2E has of it

**Bands.** Reasons to be off that do not depend on each other are added as squares. Rows that are means hardly tell
steps with one prompt: those of the own prompt are off by ONE_STEP, and all others, in TTFT and in ITL, by as much of it
as steps have a prompt. Where prompts wait for tokens, how long depends on how sizes spread: that part of k V is off by
_QUEUE_OFF. Outside of what was seen, and where rows were means, so that the answer rests on the
coefficients, so are their errors (step_model.py): of a step of the prompt for TTFT, of a mean step for ITL.

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
import operator
from typing import NamedTuple

from .closed_loop import ClosedLoop, Met, Prefills, Workload, ends
from .document import ConfigDocument
from .exceptions import REQUESTS_MAX, BadInputError, checked
from .shapes import Band, unsure
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


class RequestTimes:
    """The formulas of the module's docstring on one configuration."""

    def __init__(self, steps: StepModel, config: ConfigDocument) -> None:
        facts = config.facts
        self.steps = steps
        self._config = config
        self._speculates = facts.get("speculative_decoding", False) not in (False, "none")  # a rule may tell the method
        self._whole_prompts = facts.get("enable_chunked_prefill") is False
        self._loop = ClosedLoop(steps, _ahead(config))

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
        api = ends(operator.add, queueing, response)
        turnaround_us = max(TURNAROUND_US, api[0])
        at, ttft = self._loop.met(work, in_flight, slots, turnaround_us)
        ttft = ends(operator.add, ttft, api)
        e2e = ends(lambda first, step, last: first + tokens * step + last, ttft, at.itl, after)
        per_s = 1e6 * in_flight / (e2e[0] + turnaround_us - api[0])
        least_us, memory_us = self._gathered_itl(work, running), self._memory_us(work, in_flight, at)

        refused, waits = self._refused(work, running, at, least_us), list[str]()
        if memory_us:
            (refused if limit == "kv_capacity" and in_flight > slots else waits).append("kv_tokens")
        prefills = Prefills(running, work.output, work.uncached, self.steps.budget_of(running))
        both, of_means = self._mean_steps(prefills, work, at.k), self.steps.of_means
        met = both[1:] if of_means else both if tokens else both[:1]
        seen = (name for step in met for name in self.steps.outside(*step))
        outside = tuple(dict.fromkeys((*refused, *seen)))
        usable = self.steps.usable(outside, *met[0]) and not refused

        of_first, of_itl, one_step = 0.0, 0.0, (2.0 if outside else 1.0) * ONE_STEP * of_means
        if outside or of_means:
            of_first, of_itl = (self.steps.spread(*step) for step in both)
        with_prompt = min(running * at.k / (at.k + tokens), 1.0)  # of the steps
        of_prompts_us = one_step * (at.own[0] + with_prompt * (ttft[0] - at.own[0]))
        queued_us = _QUEUE_OFF * max(1.0 - prefills.chunks / at.k, 0.0) * at.own[0]
        first_us = math.hypot(of_first * ttft[0], of_prompts_us, queued_us)
        between_us = math.hypot(of_itl, one_step * with_prompt) * at.itl[0]
        first, between = Estimate(*unsure(ttft, first_us)), Estimate(*unsure(at.itl, between_us))
        return RequestEstimate(
            in_flight,
            running,
            first._replace(high=max(first.high, api[0] + (1.0 + math.hypot(of_first, one_step)) * memory_us)),
            between._replace(low=min(between.low, least_us)) if tokens else Estimate(0.0, 0.0, 0.0),
            Estimate(*unsure(e2e, first_us + tokens * between_us)),
            per_s,
            per_s * work.output,
            at.prefill_bound,
            (*outside, *waits),
            usable,
        )

    def _memory_us(self, work: Workload, in_flight: float, at: Met) -> float:
        """The first token, at the latest, where requests wait for memory: (N / n' - 1) R and its prefill; else 0."""
        kv_tokens = self.steps.limits.kv_tokens
        fit = math.inf if kv_tokens is None else kv_tokens / (work.prompt + work.output)
        if at.prefill_bound or min(in_flight, self.steps.requests_max) <= fit:
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


def _ahead(config: ConfigDocument) -> Band:
    """Steps handed over before the last one ended: as the engine said, else as waits make likely, or none or one."""
    if (said := config.scheduled_ahead) is not None:
        return (float(said),) * 3
    queueing = config.targets.get("api_queueing")
    return float(queueing is not None and queueing.step_ahead_us is not None), 0.0, 1.0


def _outside_time(config: ConfigDocument, name: str, feature: str, tokens: float) -> Band:
    """A time outside of the steps, of a request with so many tokens of its kind; 0 where none was learned.

    Its band is that of its rows, and at least that of its intercept: what stands in for rows has no other. Where nobody
    told either, it may be off by itself.
    """
    target = config.targets.get(name)
    model = None if target is None else target.models.get("portable")
    if target is None or model is None:
        return 0.0, 0.0, 0.0
    us_of = {each.name: each.value for each in model.coefficients}
    base_us = max(us_of.get("intercept", 0.0) - (target.step_ahead_us or 0.0), 0.0)  # that step is simulated
    us = base_us + us_of.get(feature, 0.0) * tokens
    p10, p90 = target.interval.pooled if target.interval is not None else (1.0, 1.0)
    stderr_us = next((each.stderr for each in model.coefficients if each.name == "intercept"), None)
    off_us = us * (target.interval is None) if stderr_us is None else _Z_80 * stderr_us
    return us, max(min(us * p10, us - off_us), 0.0), max(us * p90, us + off_us)
