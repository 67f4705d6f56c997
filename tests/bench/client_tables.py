"""Request tables of H100 runs: learned as an un-forked vLLM would tell them, asked for the run's own mix, and side by
side with what routers learn from request features.

Truth of a table: mean time per output token after the first, and mean end-to-end time. The load is the mean number in
flight that a request met; of the prompts all but some seven tokens were in the prefix cache, as the step events of
these runs say. Where the spans hide that, it is in the coefficients.
"""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.evaluate.baselines import BASELINES, by_column, fitted, judge_requests
from collector.evaluate.captures import load
from collector.evaluate.command import published_of
from collector.evaluate.protocol import client_view
from collector.identity import Knowledge
from collector.recordings import open_recordings
from collector.runtime.tasks import SystemClock

UNCACHED_TOKENS = 7


def judge(table: Path, converter: Path):
    """Relative errors of mean ITL and E2E, signed."""
    with tempfile.TemporaryDirectory() as directory:
        part, out = Path(directory) / "run.pb.gz", Path(directory) / "snapshot.json"
        name = table.name.removesuffix(".csv.gz")
        subprocess.run([sys.executable, converter, name, part, "--data", table.parent], check=True, capture_output=True)
        replay([part], out, Config(learners=("rls",)), SystemClock())
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


def side_by_side(table: Path, converter: Path):
    """The report of ``tracefit lab evaluate`` on single requests, and CPU seconds per request of each model."""
    with tempfile.TemporaryDirectory() as directory:
        part, name = Path(directory) / "run.pb.gz", table.name.removesuffix(".csv.gz")
        subprocess.run([sys.executable, converter, name, part, "--data", table.parent], check=True, capture_output=True)
        config = Config()
        recordings = open_recordings([part], _quiet)
        (capture,) = load(recordings, Knowledge(config), config, 0.6, partial(published_of, config))
    client = client_view(capture)
    report = judge_requests(capture.served, client, capture.cut_ns, capture.end_ns)
    served = by_column(capture.served)
    known, learned = served.met_at_arrival(1e5), served.delivered_ns <= capture.cut_ns
    costs_s = {"request": min(_ask_s(client, served, known) for _ in range(3))}
    for baseline in BASELINES:
        models = fitted(baseline, known[learned], served, learned)
        costs_s[baseline] = min(_predict_s(models, known[-200:]) for _ in range(3))
    return report, costs_s


def _ask_s(client, served, known):
    prompts, numbers = served.prompt_tokens[-200:].tolist(), (1.0 + known[-200:, 1] + known[-200:, 2]).tolist()
    start = time.process_time()
    for prompt, number in zip(prompts, numbers, strict=True):
        client.request(prompt_tokens=prompt, output_tokens=250.0, concurrency=number)
    return (time.process_time() - start) / len(prompts)


def _predict_s(models, rows):
    start = time.process_time()
    for index in range(len(rows)):
        for model in models:
            model.predict(rows[index : index + 1])
    return (time.process_time() - start) / len(rows)


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


def _quiet(_text):
    pass
