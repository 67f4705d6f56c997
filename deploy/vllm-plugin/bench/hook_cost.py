"""What the plugin costs per step: its hooks on the engine's thread, and its own thread behind them.

    python bench/hook_cost.py [--steps 20000]

A scheduler whose own calls cost nothing is watched; per step: the engine thread's CPU time with hooks less without, its
median and 99th percentile on the wall clock, and the other thread's CPU time. Records of forward passes go to a real
socket with a subscriber; of OTLP the encoding is measured, not the sending. Mixes: all requests decode; one in ten a
prefill chunk of 64; all with four tokens (speculative decoding).
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tracefit_vllm.fpm import ForwardPasses
from tracefit_vllm.otlp import Spans
from tracefit_vllm.publisher import Step
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

CHUNK = 64
MIXES: dict[str, Callable[[int], int]] = {
    "decode": lambda _: 1,
    "1 in 10 prefill": lambda number: CHUNK if number % 10 == 0 else 1,
    "speculative": lambda _: 4,
}


class Keep:
    """A publisher that keeps what the other thread would send."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lost = 0

    def enqueue(self, step: Step) -> None:
        """Keep a step."""
        self.steps.append(step)


def scheduler_of(requests: int, tokens_of: Callable[[int], int]) -> Any:
    """Return a scheduler that gives the same batch again and again."""
    ids = [f"chatcmpl-{number:016x}-0" for number in range(requests)]
    scheduled = {name: tokens_of(number) for number, name in enumerate(ids)}
    by_id = {
        name: SimpleNamespace(
            request_id=name,
            num_computed_tokens=1000 + number,
            num_output_tokens=5,
            num_prompt_tokens=2000 if tokens_of(number) == CHUNK else 9,
            num_tokens=1001 + number - scheduled[name],
        )
        for number, name in enumerate(ids)
    }
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            num_computed_tokens=[1000] * requests,
            resumed_req_ids={name for name, tokens in scheduled.items() if tokens == CHUNK},
        ),
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
    return SimpleNamespace(
        schedule=lambda: output,
        update_from_output=lambda _output, _model: None,
        get_request_counts=lambda: (requests, 0),
        requests=by_id,
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(num_gpu_blocks=10_001, get_num_free_blocks=lambda: 5000)
        ),
    )


def drive(scheduler: Any, steps: int, tap: Tap | None = None) -> tuple[float, list[float]]:
    """Return the thread's CPU us per step and each step's wall us; with a tap, as a watched scheduler calls it."""
    walls = []
    begin_ns = time.thread_time_ns()
    for _ in range(steps):
        start_ns = time.perf_counter_ns()
        at_ns = time.monotonic_ns()
        output = scheduler.schedule()
        if tap is not None:
            tap.scheduled(output, at_ns)
        at_ns = time.monotonic_ns()
        scheduler.update_from_output(output, None)
        if tap is not None:
            tap.updated(output, at_ns)
        walls.append((time.perf_counter_ns() - start_ns) / 1000)
    return (time.thread_time_ns() - begin_ns) / steps / 1000, walls


def measure(requests: int, tokens_of: Callable[[int], int], steps: int, wire: str) -> tuple[float, float, float, float]:
    """Return hook CPU, hook p50, hook p99 and the other thread's CPU, us per step."""
    bare, _ = drive(scheduler_of(requests, tokens_of), steps)
    scheduler = scheduler_of(requests, tokens_of)
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        address = f"tcp://127.0.0.1:{_free_port()}"
        told: Any = Spans(scheduler, Settings()) if wire == "otlp" else ForwardPasses(scheduler, Settings(address))
        tap = Tap(scheduler, told)
        tap.publisher = kept = Keep()
        drive(scheduler, 200, tap)
        kept.steps.clear()
        hooked, walls = drive(scheduler, steps, tap)
        if kept.lost or len(kept.steps) != steps:
            raise SystemExit(f"{len(kept.steps)} of {steps} steps, {kept.lost} lost")
        if wire == "fpm":
            told.open()
            listener.connect(address)
            listener.subscribe(b"")
            while not listener.poll(10):
                told.send(kept.steps[:1], kept.lost)
        begin_ns = time.thread_time_ns()
        for at in range(0, steps, 256):
            chunk = kept.steps[at : at + 256]
            if wire == "fpm":
                told.send(chunk, kept.lost)
            else:
                told.request(chunk).SerializeToString()
        other = (time.thread_time_ns() - begin_ns) / steps / 1000
        if wire == "fpm":
            told.close()
    cuts = statistics.quantiles(walls, n=100)
    return hooked - bare, cuts[49], cuts[98], other


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    print(
        f"{'wire':>5} {'mix':>16} {'requests':>8} {'hook CPU':>9} {'p50':>7} {'p99':>7} {'thread CPU':>11}  us per step"
    )
    for wire in ("fpm", "otlp"):
        for mix, tokens_of in MIXES.items():
            for requests in (1, 16, 64, 256):
                cpu, p50, p99, other = measure(requests, tokens_of, steps, wire)
                print(f"{wire:>5} {mix:>16} {requests:>8} {cpu:>9.1f} {p50:>7.1f} {p99:>7.1f} {other:>11.1f}")


if __name__ == "__main__":
    main()
