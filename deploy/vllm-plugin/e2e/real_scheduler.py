"""vLLM's own Scheduler and AsyncScheduler, a forward pass that takes no time, and the tap: truth and overhead.

    <vLLM's python> real_scheduler.py parity MODEL_DIRECTORY    each step's attributes against sums per request, and its
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

from tracefit_vllm.encode import STEP_KEYS
from tracefit_vllm.exporter import Exporter
from tracefit_vllm.facts import resource_attributes
from tracefit_vllm.items import StepRow
from tracefit_vllm.journeys import Finished
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

BLOCK = 16
START_WITHIN_US, START_SHARE = 5.0, 0.98
"""The others are steps between whose two stamps the kernel ran something else."""
os.environ["TRACEFITVLLM_ENABLED"] = "0"  # an installed plugin would tap the scheduler as well


class Keep:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def offer(self, item: Any) -> None:
        """Keep an item."""
        self.items.append(item)

    def count(self, reason: str) -> None:
        """Fail: nothing may be lost here."""
        raise AssertionError(reason)

    def stop(self, wait_s: float = 0) -> None:
        """Do nothing."""


def make_scheduler(model: str, asynchronous: bool, blocks: int, max_seqs: int) -> Any:
    """Build vLLM's scheduler as its engine core does, without workers."""
    import torch  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
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
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


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


def stamp(scheduler: Any) -> list[int]:
    """Note when ``schedule()`` begins, as instrumentation inside of it would."""
    inner, begins = scheduler.schedule, []

    def schedule(*args: Any, **kwargs: Any) -> Any:
        begins.append(time.monotonic_ns())
        return inner(*args, **kwargs)

    scheduler.schedule = schedule
    return begins


def parity(model: str) -> int:
    """Compare every step of a run with preemptions, in both scheduling modes; return the number of differences."""
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    wrong = 0
    for asynchronous in (False, True):
        rng = random.Random(3)
        scheduler = make_scheduler(model, asynchronous, blocks=64, max_seqs=16)
        sink = Keep()
        begins = stamp(scheduler)
        tap = Tap(scheduler, Settings(), sink, random.Random(1))
        assert tap.attach()
        truths, in_flight = [], deque()
        for step in range(1500):
            if step < 1200 and rng.random() < 0.12:
                scheduler.add_request(make_request(step, rng.randint(1, 300), rng.randint(20, 120)))
            if scheduler.running and rng.random() < 0.005:
                scheduler.finish_requests(scheduler.running[0].request_id, RequestStatus.FINISHED_ABORTED)
            output = scheduler.schedule()
            truths.append(truth(scheduler, output))
            in_flight.append((output, answer(output, scheduler.requests)))
            if len(in_flight) > asynchronous:
                scheduler.update_from_output(*in_flight.popleft())
        while in_flight:
            scheduler.update_from_output(*in_flight.popleft())
        rows = [dict(zip(STEP_KEYS, i.values, strict=True)) for i in sink.items if isinstance(i, StepRow)]
        journeys = [item for item in sink.items if isinstance(item, Finished)]
        assert len(rows) == len(truths) == 1500
        differences = sum(row[key] != value for row, t in zip(rows, truths, strict=True) for key, value in t.items())
        apart_us = sorted(abs(b - r["step.ts_start_ns"]) / 1000 for b, r in zip(begins, rows, strict=True))
        within = sum(apart <= START_WITHIN_US for apart in apart_us)
        wrong += differences + tap.errors + (within < START_SHARE * len(rows))
        kinds = [event[0] for journey in journeys for event in journey.events]
        print(
            f"async={asynchronous}: {len(rows)} steps, {sum(r['batch.num_preempted'] for r in rows)} preemptions, "
            f"{len(journeys)} journeys ({kinds.count('PREEMPTED')} PREEMPTED), {differences} differences, "
            f"{tap.errors} hook errors, {len(tap._journeys.open) if tap._journeys else 0} left open; "
            f"ts_start {apart_us[len(rows) // 2]:.1f} us apart in the median, "
            f"within {START_WITHIN_US:g} us on {within} of {len(rows)} steps"
        )
    return wrong


def overhead(model: str) -> None:
    """Print CPU per step of the scheduler's loop, bare and tapped (exporter's thread included), in turns."""
    for requests, turns in ((16, 30), (256, 10)):
        results: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(turns):
            tapped = bool(turn % 2)
            scheduler = make_scheduler(model, asynchronous=False, blocks=40_000, max_seqs=256)
            exporter = None
            if tapped:
                settings = Settings(target="127.0.0.1:4399")
                exporter = Exporter(settings, resource_attributes(scheduler, settings), Discard)
                assert Tap(scheduler, settings, exporter, random.Random(1)).attach()
            for number in range(requests):
                scheduler.add_request(make_request(number, 32, 1000))
            for _ in range(100):
                output = scheduler.schedule()
                scheduler.update_from_output(output, answer(output, scheduler.requests))
            steps = 900
            outputs_us = 0.0
            begin = time.process_time_ns()
            for _ in range(steps):
                output = scheduler.schedule()
                start = time.process_time_ns()
                model_output = answer(output, scheduler.requests)
                outputs_us += (time.process_time_ns() - start) / 1000
                scheduler.update_from_output(output, model_output)
            results[tapped].append(((time.process_time_ns() - begin) / 1000 - outputs_us) / steps)
            if exporter is not None:
                exporter.stop()
        bare, with_tap = (statistics.median(results[tapped]) for tapped in (False, True))
        print(
            f"{requests} requests: scheduler's CPU {bare:.0f} us per step bare, {with_tap:.0f} us with the plugin "
            f"(+{100 * (with_tap / bare - 1):.1f} %), its thread included; the forward pass takes no time"
        )


class Discard:
    """A sender that throws everything away."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def send(self, request: bytes, patience: object) -> bool:
        """Take it."""
        return bool(request) or patience is not None

    def close(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    if sys.argv[1] == "parity":
        sys.exit(bool(parity(sys.argv[2])))
    overhead(sys.argv[2])
