"""A scheduler with what the plugin reads of vLLM 0.12 to 0.33, small enough to know the truth of each step.

It keeps vLLM's order: running requests first, preemption from the tail when blocks run out, then the waiting ones;
``num_computed_tokens`` advances inside ``schedule()``; ``finished_req_ids`` collects until the next ``schedule()``.
What a step truly holds is summed up per request, naively, in ``truth``.
"""

from __future__ import annotations

import enum
from collections import deque
from types import SimpleNamespace

BLOCK = 16


class Status(enum.IntEnum):
    WAITING = 1
    RUNNING = 5
    PREEMPTED = 6
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9


class Request:
    def __init__(self, request_id, prompt, max_tokens, cached=0):
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self.max_tokens = max_tokens
        self.cached = min(cached, prompt - 1)
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.outputs = []
        self.status = Status.WAITING
        self.blocks = 0
        self.lost_outputs = 0

    @property
    def num_output_tokens(self):
        return len(self.outputs)

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + len(self.outputs)


class Pool:
    def __init__(self, blocks):
        self.num_gpu_blocks = blocks
        self.free = blocks - 1

    def get_num_free_blocks(self):
        return self.free


def vllm_config(*, rank=0, ranks=1, moe=False, asynchronous=False):
    """What a scheduler is given in the engine core of rank ``rank`` of a server with ``ranks`` data parallel ranks."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            served_model_name="tiny",
            model="/models/x",
            dtype="torch.float32",
            quantization=None,
            max_model_len=2048,
        ),
        parallel_config=parallel_config(rank, ranks, moe),
        scheduler_config=SimpleNamespace(
            max_num_seqs=32,
            max_num_batched_tokens=64,
            enable_chunked_prefill=True,
            async_scheduling=asynchronous,
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK, num_gpu_blocks=64, enable_prefix_caching=True, cpu_offload_gb=0.0
        ),
        kv_transfer_config=None,
        observability_config=SimpleNamespace(),
    )


def parallel_config(rank, ranks, moe):
    """As ``EngineCoreProc.run_engine_core`` leaves it before it makes the scheduler (vLLM 0.32)."""
    together = ranks > 1 and moe  # others are engines of their own: reconfigure_for_independent_dp_rank()
    return SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        enable_expert_parallel=moe,
        data_parallel_size=ranks if together else 1,
        data_parallel_rank=rank if together else 0,
        data_parallel_index=rank,
        # five are drawn where the user asked for ranks, and one is taken
        _data_parallel_master_port_list=[20001, 20002, 20003, 20004] if ranks > 1 else [],
    )


class Plan:
    """A batch being made."""

    def __init__(self):
        self.budget = 64
        self.scheduled = {}
        self.before = {}
        self.new, self.resumed, self.continued, self.preempted = [], [], [], []

    def take(self, kind, request, tokens):
        kind.append(request)
        self.scheduled[request.request_id] = tokens
        self.before[request.request_id] = request.num_computed_tokens
        self.budget -= tokens


class Scheduler:
    """The fake. Blocks are counted, not numbered; one block is vLLM's null block."""

    def __init__(self, *, resumed_are_new=False, blocks=64, asynchronous=False, config=None):
        self.resumed_are_new = resumed_are_new  # vLLM 0.32 with the second model runner
        self.asynchronous = asynchronous
        self.vllm_config = config or vllm_config(asynchronous=asynchronous)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.kv_cache_manager = SimpleNamespace(block_pool=Pool(blocks))
        self.truth: list[dict[str, float]] = []
        self.passes: list[tuple[int, ...]] = []
        self.finished: list[Request] = []
        self.shut_down = False

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def add_request(self, request):
        self.waiting.append(request)
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids, status):
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(request_id)
            if request is not None:
                if request in self.running:
                    self.running.remove(request)
                else:
                    self.waiting.remove(request)
                self._free(request, status)

    def shutdown(self):
        self.shut_down = True

    def schedule(self, throttle_prefills=False):  # noqa: ARG002 vLLM's signature since 0.25
        plan = Plan()
        self._continue_running(plan)
        self._admit_waiting(plan)
        output = self._output(plan)
        self._record_truth(output, plan.before, self.kv_cache_manager.block_pool)
        for request_id, tokens in plan.scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                output.samples.add(request_id)
                request.num_output_placeholders += 1 if self.asynchronous else 0
        self.finished_req_ids = set()
        return output

    def _continue_running(self, plan):
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                continue
            wanted = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            tokens = min(wanted, plan.budget)
            if request.num_output_tokens + request.num_output_placeholders >= request.max_tokens or tokens <= 0:
                continue
            while not self._allocate(request, tokens) and request.status is Status.RUNNING:
                victim = self.running.pop()
                plan.budget += plan.scheduled.pop(victim.request_id, 0)
                if victim in plan.continued:
                    plan.continued.remove(victim)
                self._preempt(victim)
                plan.preempted.append(victim)
            if request.status is Status.RUNNING:
                plan.take(plan.continued, request, tokens)

    def _admit_waiting(self, plan):
        while self.waiting and plan.budget and not plan.preempted and len(self.running) < 8:
            request = self.waiting[0]
            fresh = request.status is Status.WAITING
            request.num_computed_tokens = request.cached // BLOCK * BLOCK
            tokens = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            if not self._allocate(request, tokens):
                request.num_computed_tokens = 0
                break
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            plan.take(plan.new if fresh else plan.resumed, request, tokens)

    def _output(self, plan):
        new, resumed, before = plan.new, plan.resumed, plan.before
        if self.resumed_are_new:
            new, resumed = new + resumed, []
        cached = plan.continued + resumed
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=before[r.request_id]) for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids={r.request_id for r in resumed},
                num_computed_tokens=[before[r.request_id] for r in cached],
            ),
            num_scheduled_tokens=plan.scheduled,
            total_num_scheduled_tokens=sum(plan.scheduled.values()),
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids={r.request_id for r in plan.preempted},
            samples=set(),
        )

    def _record_truth(self, output, before, pool):
        requests = [(self.requests[i], n, before[i]) for i, n in output.num_scheduled_tokens.items()]
        prefills = [each for each in requests if not each[0].num_output_tokens]
        decodes = [each for each in requests if each[0].num_output_tokens]
        single, multi = ([each for each in requests if (each[1] == 1) is alone] for alone in (True, False))
        running, waiting = self.get_request_counts()
        if requests:
            self.passes.append(pass_of(requests, waiting))
        self.truth.append(
            {
                "step.id": len(self.truth) + 1,
                "queue.running_depth": running,
                "queue.waiting_depth": waiting,
                "batch.num_prefill_reqs": len(prefills),
                "batch.num_decode_reqs": len(decodes),
                "batch.scheduled_tokens": tokens_of(requests),
                "batch.prefill_tokens": tokens_of(prefills),
                "batch.decode_tokens": tokens_of(decodes),
                "batch.num_finished": len(output.finished_req_ids),
                "batch.num_preempted": len(output.preempted_req_ids),
                "batch.context_tokens": context_of(requests),
                "batch.context_tokens_single": context_of(single),
                "batch.context_tokens_multi": context_of(multi),
                "batch.num_multi_reqs": len(multi),
                "batch.multi_tokens": tokens_of(multi),
                # one query token at a time
                "batch.attn_pairs": sum(sum(c + k for k in range(1, n + 1)) for _, n, c in requests),
                "kv.blocks_total_gpu": pool.num_gpu_blocks - 1,
                "kv.blocks_free_gpu": pool.free,
                "kv.usage_gpu_ratio": 1.0 - pool.free / (pool.num_gpu_blocks - 1),
            }
        )

    def update_from_output(self, scheduler_output, model_runner_output):
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request_id not in scheduler_output.samples:
                continue
            if request.lost_outputs:
                request.lost_outputs -= 1
                continue
            request.num_output_placeholders -= 1 if self.asynchronous else 0
            request.outputs.append(7)
            if request.num_output_tokens >= request.max_tokens:
                self.running.remove(request)
                self._free(request, Status.FINISHED_LENGTH_CAPPED)
        return {0: model_runner_output}

    def _allocate(self, request, tokens):
        pool = self.kv_cache_manager.block_pool
        need = -(-(request.num_computed_tokens + tokens) // BLOCK) - request.blocks
        if need > pool.free:
            return False
        pool.free -= max(need, 0)
        request.blocks += max(need, 0)
        return True

    def _preempt(self, request):
        self._release(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.lost_outputs = request.num_output_placeholders
        request.num_output_placeholders = 0
        self.waiting.appendleft(request)

    def _release(self, request):
        self.kv_cache_manager.block_pool.free += request.blocks
        request.blocks = 0

    def _free(self, request, status):
        request.status = status
        self._release(request)
        self.finished_req_ids.add(request.request_id)
        self.finished.append(request)
        del self.requests[request.request_id]


def tokens_of(requests):
    return sum(n for _, n, _ in requests)


def context_of(requests):
    return sum(c + n for _, n, c in requests)


def pass_of(requests, waiting):
    """A forward pass as its record tells it: who computes what was known before prefills, the others decode."""
    known = [max(r.num_prompt_tokens, r.num_tokens - 1) for r, _, _ in requests]
    prefills = [each for each, end in zip(requests, known, strict=True) if each[2] < end]
    decodes = [each for each, end in zip(requests, known, strict=True) if each[2] >= end]
    before = [sum(c for _, _, c in each) for each in (prefills, decodes)]
    return len(prefills), tokens_of(prefills), before[0], len(decodes), before[1], waiting


class AsyncScheduler(Scheduler):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "asynchronous": True})


def drive(scheduler, steps):
    """Run the engine's loop: one batch at a time, or two in flight under asynchronous scheduling."""
    in_flight = deque()
    for _ in range(steps):
        in_flight.append(scheduler.schedule())
        if len(in_flight) > (1 if scheduler.asynchronous else 0):
            scheduler.update_from_output(in_flight.popleft(), "outputs")
    while in_flight:
        scheduler.update_from_output(in_flight.popleft(), "outputs")
