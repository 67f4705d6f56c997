"""Request tables of H100 runs: learned as an un-forked vLLM would tell them, asked for the run's own mix, and side by
side with what routers learn from request features.

Truth of a table: mean time per output token after the first, and mean end-to-end time. The load is the mean number in
flight that a request met; of the prompts all but some seven tokens were in the prefix cache, as the step events of
these runs say. Where the spans hide that, it is in the coefficients.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.evaluate.baselines import RequestReport, judge_requests
from collector.evaluate.captures import load
from collector.recordings import Recording
from collector.runtime.tasks import SystemClock

UNCACHED_TOKENS = 7


def judge(table: Path, exported: Path) -> tuple[float, float]:
    """Relative errors of mean ITL and E2E, signed."""
    out = exported.with_name("snapshot.json")
    replay([exported], out, Config(learners=("rls",)), SystemClock())
    config = tracefit.load(out).config()
    with gzip.open(table, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["has_error"] not in {"1", "True", "true"}]
    prompt, output, e2e_s, ttft_s = (
        [float(row[key]) for row in rows] for key in ("sim_input_tokens", "sim_output_tokens", "e2e_s", "ttft_s")
    )
    itl_us = 1e6 * (sum(e2e_s) - sum(ttft_s)) / (sum(output) - len(rows))
    mean_prompt = sum(prompt) / len(rows)
    met, mean = _in_flight([float(row["arrival_us"]) / 1e6 for row in rows], e2e_s)
    # beyond the slots the wait grows with the queue, whose mean over time is what Little's law is about
    slots = config.limits.max_num_seqs or float("inf")
    said = config.request(
        prompt_tokens=mean_prompt,
        output_tokens=sum(output) / len(rows),
        concurrency=max(1.0, met if met <= slots else mean),
        prefix_hit=0.0 if config.prefix_hits_hidden else 1.0 - UNCACHED_TOKENS / mean_prompt,
    )
    return said.itl.us / itl_us - 1.0, said.e2e.us / 1e6 / (sum(e2e_s) / len(rows)) - 1.0


def side_by_side(exported: Path) -> RequestReport:
    """The report of ``tracefit lab evaluate`` on single requests."""
    (capture,) = load(exported, list(Recording(exported, print)), Config(), 0.6)
    return judge_requests(capture.requests, capture.client, capture.cut_ns, capture.end_ns)


def _in_flight(arrivals_s, e2e_s):
    """Mean number in flight as requests met it, and over time."""
    events = sorted(
        [(at, 1) for at in arrivals_s] + [(at + e2e, -1) for at, e2e in zip(arrivals_s, e2e_s, strict=True)]
    )
    number, first, second, last = 0, 0.0, 0.0, events[0][0]
    for at, change in events:
        first += number * (at - last)
        second += number * number * (at - last)
        last, number = at, number + change
    return second / first, first / (events[-1][0] - events[0][0])
