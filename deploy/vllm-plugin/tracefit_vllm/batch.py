"""What one scheduled batch consists of, read off vLLM's SchedulerOutput right after ``schedule()``.

    n      tokens scheduled for a request in this step          (requests,)
    c      tokens it had computed before the step               (requests,)
    context = sum(c + n)        attn_pairs = sum(n*c + n*(n + 1)/2)   causal query-key pairs

Requests with n = 1 are "single", others "multi". For n = 1 the pairs are c + 1, the request's context: a pure decode
batch costs two sums over lists vLLM has made anyway, and only multi requests are looked up one by one.
Prefill means "no output token yet", the instrumented fork's rule: so is the first decode step of a request under
asynchronous scheduling, and a request that recomputes after a preemption is decode.
"""

from __future__ import annotations

from typing import Any, Final

REQUIRED_OUTPUT: Final = (
    "num_scheduled_tokens",
    "total_num_scheduled_tokens",
    "scheduled_new_reqs",
    "scheduled_cached_reqs.num_computed_tokens",
    "scheduled_cached_reqs.req_ids",
    "finished_req_ids",
)
"""Attributes of a SchedulerOutput without which no step is understood."""

BATCH_KEYS: Final = (
    "queue.running_depth",
    "queue.waiting_depth",
    "batch.num_prefill_reqs",
    "batch.num_decode_reqs",
    "batch.scheduled_tokens",
    "batch.prefill_tokens",
    "batch.decode_tokens",
    "batch.num_finished",
    "batch.num_preempted",
    "batch.context_tokens",
    "batch.context_tokens_single",
    "batch.context_tokens_multi",
    "batch.num_multi_reqs",
    "batch.multi_tokens",
    "batch.attn_pairs",
    "kv.blocks_total_gpu",
    "kv.blocks_free_gpu",
)
"""What ``summarise`` returns, in this order."""


def summarise(output: Any, scheduler: Any, prefilling: dict[str, Any]) -> tuple[int, ...]:
    """Sum up the batch.

    Args:
        output: the SchedulerOutput just made; its requests' ``num_computed_tokens`` already include this step.
        scheduler: the scheduler that made it.
        prefilling: requests without an output token by id; others than the scheduled ones may be among them.
    """
    scheduled = output.num_scheduled_tokens
    total = output.total_num_scheduled_tokens
    requests = len(scheduled)
    prefill_requests = prefill_tokens = 0
    for request_id in prefilling:
        tokens = scheduled.get(request_id)
        if tokens is not None:
            prefill_requests += 1
            prefill_tokens += tokens
    context = total + sum(output.scheduled_cached_reqs.num_computed_tokens)
    for new in output.scheduled_new_reqs:
        context += new.num_computed_tokens
    multi = multi_tokens = multi_context = multi_pairs = 0
    if total != requests:
        by_id = scheduler.requests
        for request_id in [key for key, tokens in scheduled.items() if tokens != 1]:
            tokens = scheduled[request_id]
            after = by_id[request_id].num_computed_tokens
            multi += 1
            multi_tokens += tokens
            multi_context += after
            multi_pairs += tokens * (after - tokens) + tokens * (tokens + 1) // 2
    single_context = context - multi_context
    running, waiting = queue_depths(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    return (
        running,
        waiting,
        prefill_requests,
        requests - prefill_requests,
        total,
        prefill_tokens,
        total - prefill_tokens,
        len(output.finished_req_ids),
        len(getattr(output, "preempted_req_ids", None) or ()),
        context,
        single_context,
        multi_context,
        multi,
        multi_tokens,
        single_context + multi_pairs,
        pool.num_gpu_blocks - 1,  # the null block is never used
        pool.get_num_free_blocks(),
    )


def queue_depths(scheduler: Any) -> tuple[int, int]:
    """Return running and waiting requests.

    vLLM 0.20 to 0.25 split the waiting requests into ``waiting`` and ``skipped_waiting``, 0.32 into ``waiting`` and
    ``kv_holding_waiting``; ``get_request_counts`` (0.12 and later) adds them up.
    """
    counts = getattr(scheduler, "get_request_counts", None)
    if counts is None:
        return len(scheduler.running), len(scheduler.waiting)
    running, waiting = counts()
    return running, waiting


def snapshots(output: Any, scheduler: Any) -> list[tuple[str, str, int, int, int, int, int]]:
    """Return (id, phase, prompt, computed before, outputs, preemptions, scheduled now) of each running request."""
    scheduled = output.num_scheduled_tokens
    rows = []
    for request in scheduler.running:
        tokens = scheduled.get(request.request_id, 0)
        outputs = request.num_output_tokens
        rows.append(
            (
                request.request_id,
                "DECODE" if outputs else "PREFILL",
                request.num_prompt_tokens,
                max(request.num_computed_tokens - tokens, 0),
                outputs,
                getattr(request, "num_preemptions", 0),
                tokens,
            )
        )
    return rows
