"""llm-d-inference-sim: a configuration file of its ``per-token`` calculator.

The simulator knows four numbers, and one factor for the load that multiplies all of them:

    ITL(n)    = cut(inter-token-latency · L(n))                         L(n) = 1 + (f - 1) (n - 1) / (N - 1)
    TTFT(n)   = (prefill-overhead + uncached · prefill-time-per-token) · L(n)
    cut       = whole milliseconds, downwards      N = max-num-seqs      f = time-factor-under-load >= 1

Ours are ITL(n) = tracefit.Config.request at n requests in flight, for the mean request. Fitted are m (whole
milliseconds around ITL(1)) and f, so that the worst |ITL of the simulator ÷ ours - 1| at 1, 8 and N is least, and a
quarter of the worst at 1, 2, 4, … N beside it: a curve cannot be held by a line between its ends.
For each m the best f lies where two errors balance, of a and b requests; tried are all pairs, a = b too:

    (m L(a) - half) / ITL(a) + (m L(b) - half) / ITL(b) = 2        half a millisecond is what cutting takes

of which L is linear in f.

Prefill is the line through TTFT at half and twice the mean uncached prompt, of a request that is alone. Guards: f >= 1,
m >= 1 ms, overhead >= 0; a standard deviation below 1 ms is none, and of the mean at most 30 %.

Reference: docs/latency-simulation.md of llm-d-inference-sim.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from online import ConfigSnapshot, Snapshot
from tracefit import Config, TracefitError

from .translation import Assumptions, ExportError, Source, comments, requests_of, source_of

_HALF_MS = 0.5
_CANDIDATES = 64
_MIDDLE = 8
_BETWEEN = 0.25
_P10_TO_P90 = 2.563  # standard deviations between the 10th and the 90th percentile of a normal distribution
_DEVIATION_MAX = 0.3


class SimulatorLatency(NamedTuple):
    """The simulator's numbers.

    ``worst``: the largest relative error of its ITL at 1, 8 and ``max_num_seqs``. ``crowded_ttft``: its TTFT at
    ``max_num_seqs`` divided by ours.
    """

    max_num_seqs: int
    prefill_overhead_ms: int
    prefill_us_per_token: int
    itl_ms: int
    itl_deviation_ms: int
    load_factor: float
    worst: float
    crowded_ttft: float


def render_llm_d_sim(snapshot: Snapshot, config: ConfigSnapshot, assumptions: Assumptions) -> bytes:
    """The file for ``--config``.

    Raises:
        ExportError: there are no coefficients, or nobody said how many requests run at once or what they are like.
    """
    source = source_of(snapshot, config, assumptions)
    if assumptions.prefix_hit and any(each.reason for each in source.client.coefficients()):
        raise ExportError("--prefix-hit: what a prompt token takes holds the hits of this server already; leave it out")
    prompt, output = requests_of(config, assumptions)
    latency = simulator_latency(source.client, prompt, output, assumptions.prefix_hit)
    model = str(config.config.get("model", "")) or "unknown"
    body = {
        "model": model,
        "max-num-seqs": latency.max_num_seqs,
        "latency-calculator": "per-token",
        "prefill-overhead": f"{latency.prefill_overhead_ms}ms",
        "prefill-time-per-token": f"{latency.prefill_us_per_token}us",
        "inter-token-latency": f"{latency.itl_ms}ms",
        "inter-token-latency-std-dev": f"{latency.itl_deviation_ms}ms",
        "time-factor-under-load": latency.load_factor,
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in body.items()]
    return (comments(*_head(source, latency, prompt, output, assumptions)) + "port: 8000\n" + "".join(lines)).encode()


def _head(
    source: Source, latency: SimulatorLatency, prompt: float, output: float, assumptions: Assumptions
) -> tuple[str, ...]:
    engine = source.client.limits.max_num_seqs
    held = () if engine == latency.max_num_seqs else (f"max-num-seqs: of {engine} the KV cache holds so many at once",)
    return (
        *source.heading,
        f"for requests of {prompt:.0f} prompt and {output:.0f} output tokens, {assumptions.prefix_hit:.0%} cached",
        *held,
        "lost: context (longer requests decode no slower here), prefills that slow down others' decoding as such,",
        "lost: the shape over the batch (one straight line from 1 to max-num-seqs), error bars; whole milliseconds",
        "lost: TTFT under load: the one factor holds for prefills too, which load slows far less; it is right for a",
        f"request alone, and {latency.crowded_ttft:.1f} times tracefit's with {latency.max_num_seqs} running",
        f"ITL here against tracefit's own, worst of 1, 8 and {latency.max_num_seqs} running: {latency.worst:.1%}",
    )


def simulator_latency(client: Config, prompt: float, output: float, prefix_hit: float) -> SimulatorLatency:
    """Fit the simulator's numbers; see the module's docstring.

    Raises:
        ExportError: the engine's ``max_num_seqs`` is not known, or a number makes no sense.
    """
    try:
        slots = _slots(client, prompt, output)
        sizes = sorted({1 << power for power in range(slots.bit_length())} | {slots})
        own_ms = {n: _request(client, prompt, output, prefix_hit, n)[0] for n in sizes}
        uncached = max(1.0, prompt * (1.0 - prefix_hit))
        low, high = (_request(client, max(1.0, uncached * part), output, 0.0, 1)[1] for part in (0.5, 2.0))
        alone = client.request(prompt_tokens=prompt, output_tokens=output, prefix_hit=prefix_hit).itl
        crowded_ms = _request(client, prompt, output, prefix_hit, slots)[1]
    except TracefitError as error:
        raise ExportError(str(error)) from None
    per_token_us = max(0.0, 1e3 * (high - low) / (1.5 * uncached))
    overhead_ms = max(0.0, high - per_token_us * 2.0 * uncached / 1e3)
    itl_ms, load_factor, worst = _fit(own_ms, slots)
    deviation_ms = min((alone.high - alone.low) / _P10_TO_P90 / 1e3, _DEVIATION_MAX * itl_ms)
    simulated_ms = load_factor * (overhead_ms + uncached * per_token_us / 1e3)
    return SimulatorLatency(
        max_num_seqs=slots,
        prefill_overhead_ms=round(overhead_ms),
        prefill_us_per_token=round(per_token_us),
        itl_ms=itl_ms,
        itl_deviation_ms=math.floor(deviation_ms),
        load_factor=load_factor,
        worst=worst,
        crowded_ttft=simulated_ms / crowded_ms,
    )


def _slots(client: Config, prompt: float, output: float) -> int:
    """Most requests that run at once: ``max_num_seqs``, or what the KV cache holds of them if that is less."""
    if client.limits.max_num_seqs is None:
        raise ExportError("--max-num-seqs: the snapshot does not know how many requests the engine runs at once")
    crowd = client.request(prompt_tokens=prompt, output_tokens=output, concurrency=client.limits.max_num_seqs)
    return max(1, int(crowd.running))


def _request(client: Config, prompt: float, output: float, prefix_hit: float, n: int) -> tuple[float, float]:
    """ITL and TTFT in milliseconds of ``n`` requests in flight; of a single output token its step stands for ITL."""
    seen = client.request(
        prompt_tokens=prompt, output_tokens=max(output, 2.0), prefix_hit=prefix_hit, concurrency=float(n)
    )
    return seen.itl.ms, seen.ttft.ms


def _fit(own_ms: dict[int, float], slots: int) -> tuple[int, float, float]:
    """Whole milliseconds at one request, the factor at ``slots``, and the worst relative error of both."""
    alone = own_ms[1]
    if not alone > 0.0:
        raise ExportError("the coefficients say that a token takes no time")
    width = max(1, math.ceil(0.2 * alone))
    stride = max(1, width * 2 // _CANDIDATES)
    ends = {1, min(_MIDDLE, slots), slots}
    fits = []
    for itl_ms in range(max(1, round(alone) - width), round(alone) + width + 1, stride):
        for factor in _factors(own_ms, itl_ms, slots):
            errors = {n: abs(simulated_ms(itl_ms, factor, n, slots) / own - 1.0) for n, own in own_ms.items()}
            worst = max(errors[n] for n in ends)
            fits.append((worst + _BETWEEN * max(errors.values()), itl_ms, factor, worst))
    return min(fits)[1:]


def _factors(own_ms: dict[int, float], itl_ms: int, slots: int) -> set[float]:
    parts = [(1.0 / own, (n - 1) / (slots - 1) / own) for n, own in own_ms.items() if n > 1]
    balanced = {1.0}
    for one, its_slope in parts:
        for other, others_slope in parts:
            level = (2.0 + _HALF_MS * (one + other)) / itl_ms - one - other
            balanced.add(max(1.0, round(1.0 + level / (its_slope + others_slope), 4)))
    return balanced


def simulated_ms(itl_ms: int, load_factor: float, n: int, slots: int) -> int:
    """What the simulator waits between tokens when ``n`` requests run in so many slots."""
    load = 1.0 if slots <= 1 else 1.0 + (load_factor - 1.0) * (n - 1) / (slots - 1)
    return int(itl_ms * load)
