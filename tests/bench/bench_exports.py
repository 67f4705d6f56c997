"""What other programs make of our files, beside what the coefficients say: ``make bench WHAT=exports``.

Learned from the bundled recordings, with the limits their servers were started with, for three mixes each. Files of
llm-d-inference-sim by its own formula, Dynamo's table by its own look-up. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import io
import sys
import time

import numpy as np

import tracefit
from exporters.client_view import client_config
from exporters.files import Assumptions, render_dynamo
from exporters.files.dynamo import MOCKER_FILE
from exporters.files.llm_d_sim import simulated_ms, simulator_latency
from online import ConfigSnapshot, Snapshot
from tests.bench.client_minutes import LIMITS
from tests.support.pipelines import replayed
from tests.support.recordings import otlp_file, recording
from tests.tracefit.example_snapshot import encoded

MIXES = ((200.0, 200.0, 0.0), (1500.0, 300.0, 0.0), (4000.0, 100.0, 0.5))
WITHIN = 0.1
KV_TOKENS = 100_000


def learned() -> list[tuple[str, Snapshot, ConfigSnapshot, Assumptions]]:
    """The hand-made snapshot, and what the recordings teach."""
    made = Snapshot.from_json(encoded())
    found = [("example", made, made.configs[0], Assumptions())]
    for name, limits in LIMITS.items():
        snapshot = replayed(recording(otlp_file(name))).snapshot(0, 1)
        assumed = Assumptions(kv_tokens=KV_TOKENS, **limits)
        found.append((name, snapshot, snapshot.configs[0], assumed))
    return found


def simulated(name: str, client: tracefit.Config) -> float:
    """Print one line a mix; the worst error of ITL at 1, 8 and max-num-seqs."""
    worst = 0.0
    for prompt, output, hit in MIXES:
        start = time.process_time()
        latency = simulator_latency(client, prompt, output, hit)
        cost_ms = 1e3 * (time.process_time() - start)
        sizes = sorted({1, min(8, latency.max_num_seqs), latency.max_num_seqs})
        itl, ttft = [], []
        for n in sizes:
            own = client.request(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, concurrency=n)
            load = simulated_ms(latency.itl_ms, latency.load_factor, n, latency.max_num_seqs) / latency.itl_ms
            uncached = prompt * (1.0 - hit)
            theirs_ms = (latency.prefill_overhead_ms + uncached * latency.prefill_us_per_token / 1e3) * load
            itl.append(simulated_ms(latency.itl_ms, latency.load_factor, n, latency.max_num_seqs) / own.itl.ms - 1.0)
            ttft.append(theirs_ms / own.ttft.ms - 1.0)
        worst = max(worst, *map(abs, itl))
        shown = "  ".join(f"{n:>3}: ITL {a:+5.1%} TTFT {b:+6.1%}" for n, a, b in zip(sizes, itl, ttft, strict=True))
        sys.stdout.write(f"llm-d-sim  {name:<20} {prompt:>5.0f}/{output:<4.0f} {shown}  ({cost_ms:.0f} ms)\n")
    return worst


def looked_up(name: str, snapshot: Snapshot, config: ConfigSnapshot, assumed: Assumptions) -> None:
    """Print how far the mocker's table is from the coefficients, at random batches of 500 tokens of context or more."""
    start = time.process_time()
    files = render_dynamo(snapshot, config, assumed)
    cost_ms = 1e3 * (time.process_time() - start)
    client = client_config(config).assuming(
        max_num_seqs=assumed.max_num_seqs,
        max_num_batched_tokens=assumed.max_num_batched_tokens,
        kv_tokens=assumed.kv_tokens,
    )
    table = np.load(io.BytesIO(files[MOCKER_FILE]))
    kv_axis, context_axis, itl_ms = (
        table[key] for key in ("decode_active_kv_tokens", "decode_context_length", "decode_itl")
    )
    rng, errors = np.random.default_rng(7), []
    factor = min(max(client.targets["step_time"].mean_factor, 0.5), 2.0)
    while len(errors) < 2000:
        context, batch = float(rng.uniform(500, 8000)), int(rng.integers(1, (client.limits.max_num_seqs or 64) + 1))
        if context * batch > kv_axis[-1]:
            continue
        cell = itl_ms[np.searchsorted(kv_axis, context * batch), np.searchsorted(context_axis, context)]
        own_ms = client.step_time(requests=batch, decode_context_tokens=context * batch).us * factor / 1e3
        errors.append(abs(cell / own_ms - 1.0))
    sys.stdout.write(
        f"dynamo     {name:<20} table: mean {np.mean(errors):.1%}, 9 of 10 within {np.quantile(errors, 0.9):.1%}"
        f"  ({cost_ms:.0f} ms)\n"
    )


def main() -> int:
    """Run every section."""
    worst = 0.0
    for name, snapshot, config, assumed in learned():
        client = client_config(config).assuming(
            max_num_seqs=assumed.max_num_seqs, max_num_batched_tokens=assumed.max_num_batched_tokens
        )
        worst = max(worst, simulated(name, client))
        looked_up(name, snapshot, config, assumed)
    verdict = "holds" if worst <= WITHIN else "MISSED"
    sys.stdout.write(
        f"llm-d-sim  worst ITL at 1, 8 and max-num-seqs {worst:.1%}   target <= {WITHIN:.0%}   {verdict}\n"
    )
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
