"""A small vLLM that says what it does: jobs in, what each step held and took out.

Scheduling follows vLLM's documented order: running requests first (one token each, unfinished prefills what the
budget leaves), then the waiting queue. A step takes beta . (1, prefill tokens, decode context, requests) microseconds,
exactly. Asynchronous: schedule(n + 1) runs while step n executes, and a request's first decode step counts as a
one-token prefill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

UNIX_NS = 1_795_000_000_000_000_000
MONO_NS = 10**12
BETA_US = (7000.0, 45.0, 0.12, 160.0)


@dataclass
class Job:
    """One request. Steps are those of the engine: it is queued just before ``queued_step``."""

    name: str
    prompt: int
    outputs: int
    queued_step: int = 1
    preempted_step: int | None = None
    resumed_step: int | None = None
    aborted_step: int | None = None
    arrived_before_us: float = 1500.0
    streams: bool = True
    samples: int = 1
    marks: list[tuple[str, int, int, int]] = field(default_factory=list)
    done: int = 0
    computed: int = 0
    status: str = "length"

    def mark(self, kind: str, step: int, ns: int) -> None:
        self.marks.append((kind, step, ns, self.done))

    def step_of(self, kind: str) -> int:
        return next(step for name, step, *_ in self.marks if name == kind)

    def ns_of(self, kind: str) -> int:
        return next(ns for name, _, ns, _ in self.marks if name == kind)


@dataclass
class Run:
    """What an engine did: summaries as the wire has them, jobs with their marks, and the truth per step."""

    jobs: list[Job]
    summaries: list[dict[str, int | float]]
    snapshots: list[list[dict[str, object]]]
    prefill_tokens: list[int]
    context_tokens: list[int]
    recomputed_tokens: list[int]
    step_us: list[float]
    offset_ns: int

    def unix(self, mono_ns: int) -> int:
        return mono_ns + self.offset_ns

    def truth(self, name: str) -> np.ndarray:
        return np.array([s[name] for s in self.summaries], float)


def run_engine(  # noqa: C901 one loop, as an engine has one
    jobs: Sequence[Job],
    *,
    budget: int = 512,
    asynchronous: bool = False,
    start_ns: int = MONO_NS,
    offset_ns: int = UNIX_NS - MONO_NS,
    idle_us: float = 2e6,
) -> Run:
    """Run all jobs to their end; the engine idles ``idle_us`` when nothing is left to do before the next one."""
    run = Run([dataclasses.replace(job, marks=[]) for job in jobs], [], [], [], [], [], [], offset_ns)
    waiting: list[Job] = []
    running: list[Job] = []
    todo = sorted(run.jobs, key=lambda j: j.queued_step)
    now, previous_us, finished = float(start_ns), 0.0, 0
    for step in range(1, 20_000):
        if not running and not waiting:
            if not todo:
                break
            if todo[0].queued_step > step and finished == 0 and run.summaries:
                now += idle_us * 1e3
                skipped = todo[0].queued_step - step  # nothing happens while idle: step ids do not advance
                for job in todo:
                    job.queued_step -= skipped
        for job in [j for j in todo if j.queued_step <= step]:
            todo.remove(job)
            job.mark("QUEUED", step - 1, int(now) - 30_000)
            waiting.append(job)
        begin = int(now)
        for job in [j for j in (*running, *waiting) if j.aborted_step is not None and j.aborted_step < step]:
            (running if job in running else waiting).remove(job)
            job.status = "aborted"
            job.mark("FINISHED", step - 1, begin - 10_000)
            finished += 1
        batch, preempted = _schedule(step, begin, running, waiting, budget)
        took_us = _record(run, step, begin, batch, running, waiting, finished, preempted, asynchronous)
        finished = 0
        gap_us = previous_us if asynchronous else took_us
        previous_us = took_us if batch else 0.0
        now += (gap_us if batch or (asynchronous and gap_us) else 200.0) * 1e3
        if asynchronous and not gap_us:
            now += 200e3
        ends = int(now + (took_us * 1e3 if asynchronous else 0.0)) - 150_000
        for job, tokens in batch:
            job.computed += tokens
            if job.computed < job.prompt + job.done:
                continue
            job.done += 1
            if job.done == 1:
                job.mark("FIRST_TOKEN", step, ends)
            if job.done >= job.outputs:
                job.mark("FINISHED", step, ends)
                running.remove(job)
                finished += 1
    return run


def _schedule(step, begin, running, waiting, budget):
    preempted = [j for j in running if j.preempted_step == step]
    for job in preempted:
        running.remove(job)
        job.mark("PREEMPTED", step, begin + 100_000)
        job.computed = 0
        waiting.insert(0, job)
    batch = []
    for job in list(running):
        tokens = min(job.prompt + job.done - job.computed, budget)
        if tokens > 0:
            batch.append((job, tokens))
            budget -= tokens
    for job in list(waiting):
        held = job.preempted_step is not None and job.preempted_step <= step < (job.resumed_step or 0)
        if budget <= 0 or held:
            continue
        waiting.remove(job)
        running.append(job)
        tokens = min(job.prompt + job.done - job.computed, budget)
        job.mark("SCHEDULED", step, begin + 120_000)
        batch.append((job, tokens))
        budget -= tokens
    return batch, len(preempted)


def _record(run, step, begin, batch, running, waiting, finished, preempted, asynchronous):
    first = [j for j, _ in batch if asynchronous and j.done == 1 and j.computed == j.prompt]
    prefill = [(j, t) for j, t in batch if j.done == 0]
    decode = [(j, t) for j, t in batch if j.done > 0]
    context = sum(j.computed + t for j, t in decode if j not in first)
    recomputed = sum(t - 1 for j, t in decode)
    tokens = sum(t for _, t in prefill)
    took_us = 0.0
    if batch:
        work = tokens + len(first) + recomputed
        took_us = BETA_US[0] + BETA_US[1] * work + BETA_US[2] * context + BETA_US[3] * len(batch)
    run.prefill_tokens.append(tokens + len(first))
    run.context_tokens.append(context)
    run.recomputed_tokens.append(recomputed)
    run.step_us.append(took_us)
    blocks = sum(-(-(j.computed + t) // 16) for j, t in batch)
    run.summaries.append(
        {
            "step.id": step,
            "step.ts_start_ns": begin,
            "step.ts_end_ns": begin + 150_000,
            "step.duration_us": 150,
            "queue.running_depth": len(running),
            "queue.waiting_depth": len(waiting),
            "batch.num_prefill_reqs": len(prefill) + len(first),
            "batch.num_decode_reqs": len(decode) - len(first),
            "batch.scheduled_tokens": sum(t for _, t in batch),
            "batch.prefill_tokens": tokens + len(first),
            "batch.decode_tokens": sum(t for _, t in decode) - len(first),
            "batch.num_finished": finished,
            "batch.num_preempted": preempted,
            "kv.usage_gpu_ratio": min(1.0, blocks / 4096),
            "kv.blocks_total_gpu": 4096,
            "kv.blocks_free_gpu": max(0, 4096 - blocks),
        }
    )
    run.snapshots.append(
        [
            {
                "step.id": step,
                "request.id": f"{j.name}-0a1b2c3d",
                "request.num_computed_tokens": j.computed,
                "request.scheduled_tokens_this_step": t,
                "request.num_output_tokens": j.done,
            }
            for j, t in batch
        ]
    )
    return took_us


def many_jobs(count: int, *, seed: int = 0, spacing: int = 12) -> list[Job]:
    """An open load of jobs of mixed size."""
    random = np.random.default_rng(seed)
    return [
        Job(
            f"job{index}",
            prompt=int(random.integers(16, 400)),
            outputs=int(random.integers(2, 120)),
            queued_step=1 + int(index * spacing + random.integers(0, spacing)),
        )
        for index in range(count)
    ]
