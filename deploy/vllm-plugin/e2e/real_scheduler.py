"""vLLM's own Scheduler and AsyncScheduler, watched, and a forward pass that takes no time: truth and overhead.

    <vLLM's python> real_scheduler.py parity MODEL_DIRECTORY    each step and record against sums per request, and the
                                                                start against a stamp taken inside of ``schedule()``
    <vLLM's python> real_scheduler.py overhead MODEL_DIRECTORY  CPU per step with and without the plugin

Parity runs with few KV blocks, so that requests are preempted and resume. The truth is summed up by this file from the
SchedulerOutput and the requests themselves, one by one, at the moment ``schedule()`` returns.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tracefit_vllm
from tracefit_vllm.otlp import STEP_KEYS, step_numbers
from tracefit_vllm.publisher import Step

BLOCK = 16
START_WITHIN_US, START_SHARE = 5.0, 0.98
"""The others are steps between whose two stamps the kernel ran something else."""
WIRES = {"fpm": "tcp://127.0.0.1:20399", "otlp": "http://127.0.0.1:4399"}


class Keep:
    """A publisher that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lost = 0

    def enqueue(self, step: Step) -> None:
        """Keep a step."""
        self.steps.append(step)

    def stop(self, wait_s: float = 0) -> None:
        """Do nothing."""


def make_scheduler(model: str, asynchronous: bool, blocks: int, max_seqs: int, wire: str = "") -> Any:
    """Build a scheduler as vLLM's engine core does, without workers; watched, if there is a wire."""
    import torch  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: PLC0415
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415

    arguments = EngineArgs(
        model=model,
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        async_scheduling=asynchronous,
        scheduler_cls="tracefit_vllm.TracedScheduler" if wire else None,
    )
    os.environ["TRACEFITVLLM_ENDPOINT"] = WIRES.get(wire, "")
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    assert isinstance(scheduler, AsyncScheduler) == asynchronous
    assert isinstance(scheduler, tracefit_vllm.TracedScheduler) == bool(wire)
    return scheduler


def make_request(number: int, prompt: int, tokens: int) -> Any:
    """Build a request with random prompt tokens."""
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.utils.hashing import sha256  # noqa: PLC0415
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: PLC0415
    from vllm.v1.request import Request  # noqa: PLC0415

    rng = random.Random(number)
    init_none_hash(sha256)
    return Request(
        request_id=f"cmpl-{number:016x}-0",
        prompt_token_ids=[rng.randrange(300, 4000) for _ in range(prompt)],
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def answer(output: Any, requests: dict[str, Any]) -> Any:
    """Sample one token for each request whose known tokens are all computed."""
    from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415

    ids = list(output.num_scheduled_tokens)
    sampled = []
    for name in ids:
        request = requests.get(name)
        sampled.append([] if request is None or request.is_prefill_chunk else [7])
    return ModelRunnerOutput(req_ids=ids, req_id_to_index={n: i for i, n in enumerate(ids)}, sampled_token_ids=sampled)


def truth(scheduler: Any, output: Any) -> dict[str, int]:
    """Sum up the batch request by request."""
    sums = dict.fromkeys(("prefill", "prefill_tokens", "context", "single", "multi", "multi_tokens", "pairs"), 0)
    for name, tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        after = request.num_computed_tokens
        if not request.num_output_tokens:
            sums["prefill"] += 1
            sums["prefill_tokens"] += tokens
        sums["context"] += after
        sums["single"] += after if tokens == 1 else 0
        sums["multi"] += tokens != 1
        sums["multi_tokens"] += tokens if tokens != 1 else 0
        sums["pairs"] += sum(range(after - tokens + 1, after + 1))
    total = sum(output.num_scheduled_tokens.values())
    requests = len(output.num_scheduled_tokens)
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "batch.num_prefill_reqs": sums["prefill"],
        "batch.num_decode_reqs": requests - sums["prefill"],
        "batch.scheduled_tokens": total,
        "batch.prefill_tokens": sums["prefill_tokens"],
        "batch.decode_tokens": total - sums["prefill_tokens"],
        "batch.num_finished": len(output.finished_req_ids),
        "batch.num_preempted": len(output.preempted_req_ids or ()),
        "batch.context_tokens": sums["context"],
        "batch.context_tokens_single": sums["single"],
        "batch.context_tokens_multi": sums["context"] - sums["single"],
        "batch.num_multi_reqs": sums["multi"],
        "batch.multi_tokens": sums["multi_tokens"],
        "batch.attn_pairs": sums["pairs"],
        "queue.running_depth": len(scheduler.running),
        "queue.waiting_depth": len(scheduler.waiting),
        "kv.blocks_total_gpu": pool.num_gpu_blocks - 1,
        "kv.blocks_free_gpu": pool.get_num_free_blocks(),
    }


def passes(scheduler: Any, output: Any) -> tuple[int, ...]:
    """Sum up the batch as a record of a forward pass has it, request by request."""
    prefills, decodes = [], []
    for name, tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[name]
        before = request.num_computed_tokens - tokens
        is_prefill = before < request.num_prompt_tokens or before < request.num_tokens - 1
        (prefills if is_prefill else decodes).append((tokens, before))
    prompt, cached = sum(tokens for tokens, _ in prefills), sum(before for _, before in prefills)
    waiting = len(scheduler.waiting) + len(getattr(scheduler, "kv_holding_waiting", ()))
    return len(prefills), prompt, cached, len(decodes), sum(before for _, before in decodes), waiting


def stamp(scheduler: Any) -> list[int]:
    """Note when ``schedule()`` of vLLM begins, as instrumentation inside of it would."""
    inner, begins = scheduler.kv_cache_manager.new_step_starts, []

    def new_step_starts() -> Any:
        begins.append(time.monotonic_ns())
        return inner()

    scheduler.kv_cache_manager.new_step_starts = new_step_starts
    return begins


def run(scheduler: Any, asynchronous: bool) -> tuple[list[dict[str, int]], list[tuple[int, ...]]]:
    """Drive 1500 steps with arrivals, preemptions and aborts; the truth of each."""
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    rng = random.Random(3)
    truths, records, in_flight = [], [], deque()
    for step in range(1500):
        if step < 1200 and rng.random() < 0.12:
            scheduler.add_request(make_request(step, rng.randint(1, 300), rng.randint(20, 120)))
        if scheduler.running and rng.random() < 0.005:
            scheduler.finish_requests(scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        truths.append(truth(scheduler, output))
        if output.total_num_scheduled_tokens:
            records.append(passes(scheduler, output))
        in_flight.append((output, answer(output, scheduler.requests)))
        if len(in_flight) > asynchronous:
            scheduler.update_from_output(*in_flight.popleft())
    while in_flight:
        scheduler.update_from_output(*in_flight.popleft())
    return truths, records


def parity(model: str) -> int:
    """Compare every step of a run with preemptions, on both wires and in both modes; return how many differ."""
    wrong = 0
    for asynchronous in (False, True):
        for wire in WIRES:
            scheduler = make_scheduler(model, asynchronous, blocks=64, max_seqs=16, wire=wire)
            sink = scheduler._tracefit.publisher = Keep()
            begins = stamp(scheduler)
            truths, records = run(scheduler, asynchronous)
            errors = sink.lost
            if wire == "fpm":
                told = [step.batch for step in sink.steps if step.batch[0] + step.batch[3]]
                assert len(told) == len(records)
                differences = sum(got != want for got, want in zip(told, records, strict=True))
                assert all(step.done_ns > step.since_ns for step in sink.steps)
                wrong += differences + errors
                print(f"async={asynchronous} fpm: {len(told)} records, {differences} differ, {errors} hook errors")
                continue
            rows = [dict(zip(STEP_KEYS, step_numbers(step), strict=True)) for step in sink.steps]
            assert len(rows) == len(truths) == 1500
            differences = sum(
                row[key] != value for row, t in zip(rows, truths, strict=True) for key, value in t.items()
            )
            apart_us = sorted(abs(b - step.start_ns) / 1000 for b, step in zip(begins, sink.steps, strict=True))
            within = sum(apart <= START_WITHIN_US for apart in apart_us)
            wrong += differences + errors + (within < START_SHARE * len(rows))
            preempted = sum(row["batch.num_preempted"] for row in rows)
            print(
                f"async={asynchronous} otlp: {len(rows)} steps, {preempted} preemptions, {differences} differences, "
                f"{errors} hook errors; ts_start {apart_us[len(rows) // 2]:.1f} us apart in the median, "
                f"within {START_WITHIN_US:g} us on {within} of {len(rows)} steps"
            )
    return wrong


def overhead(model: str) -> None:
    """Print CPU per step of the scheduler's loop, bare and watched (publisher's thread included), in turns."""
    for requests, rounds in ((16, 30), (256, 10)):
        results: dict[str, list[float]] = {"": [], **{wire: [] for wire in WIRES}}
        for _ in range(rounds):
            for wire, cpu_us in results.items():
                scheduler = make_scheduler(model, False, blocks=40_000, max_seqs=256, wire=wire)
                if wire == "otlp":
                    scheduler._tracefit._wire.open = lambda: None
                    scheduler._tracefit._wire.send = _encode_only(scheduler._tracefit._wire)
                for number in range(requests):
                    scheduler.add_request(make_request(number, 32, 1000))
                for _ in range(100):
                    output = scheduler.schedule()
                    scheduler.update_from_output(output, answer(output, scheduler.requests))
                cpu_us.append(_cpu_us(scheduler, 900))
                if wire:
                    scheduler._tracefit.publisher.stop()
        bare, *watched = (statistics.median(cpu_us) for cpu_us in results.values())
        for wire, cpu_us in zip(WIRES, watched, strict=True):
            print(
                f"{requests} requests: scheduler's CPU {bare:.0f} us per step bare, {cpu_us:.0f} us with the plugin "
                f"over {wire} (+{100 * (cpu_us / bare - 1):.1f} %), its thread included; the forward pass takes no time"
            )


def _cpu_us(scheduler: Any, steps: int) -> float:
    outputs_us = 0.0
    begin = time.process_time_ns()
    for _ in range(steps):
        output = scheduler.schedule()
        start = time.process_time_ns()
        model_output = answer(output, scheduler.requests)
        outputs_us += (time.process_time_ns() - start) / 1000
        scheduler.update_from_output(output, model_output)
    return ((time.process_time_ns() - begin) / 1000 - outputs_us) / steps


def _encode_only(wire: Any) -> Any:
    """Encode and throw away: nobody listens, and waiting for them is no work."""

    def send(items: Any, _lost: Any) -> bool:
        return not items or bool(wire.request(items).SerializeToString())

    return send


if __name__ == "__main__":
    if sys.argv[1] == "parity":
        sys.exit(bool(parity(sys.argv[2])))
    overhead(sys.argv[2])
