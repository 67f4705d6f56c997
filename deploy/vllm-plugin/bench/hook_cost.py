"""What the hooks cost per step, and the exporter's thread behind them.

    python bench/hook_cost.py [--steps 20000]

A scheduler whose own calls cost nothing is tapped; per step: the engine thread's CPU time with hooks less without, its
median and 99th percentile on the wall clock, and the exporter thread's CPU time for encoding (sending is stubbed out).
Mixes: all requests decode; one in ten a prefill chunk of 64; all with four tokens (speculative decoding).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tracefit_vllm.encode import Encoder
from tracefit_vllm.settings import Settings
from tracefit_vllm.tap import Tap

MIXES: dict[str, Callable[[int], int]] = {
    "decode": lambda _: 1,
    "1 in 10 prefill": lambda number: 64 if number % 10 == 0 else 1,
    "speculative": lambda _: 4,
}


class KeepLast:
    """A sink that keeps what the exporter would encode."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def offer(self, item: Any) -> None:
        """Keep an item."""
        self.items.append(item)

    def count(self, reason: str) -> None:
        """Fail: no hook may err here."""
        raise AssertionError(reason)

    def stop(self, wait_s: float = 0) -> None:
        """Do nothing."""


def scheduler_of(requests: int, tokens_of: Callable[[int], int]) -> Any:
    """Return a scheduler that gives the same batch again and again."""
    ids = [f"chatcmpl-{number:016x}-0" for number in range(requests)]
    scheduled = {name: tokens_of(number) for number, name in enumerate(ids)}
    by_id = {
        name: SimpleNamespace(
            request_id=name, num_computed_tokens=1000 + number, num_output_tokens=5, num_prompt_tokens=9, max_tokens=99
        )
        for number, name in enumerate(ids)
    }
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=ids, num_computed_tokens=[1000] * requests, resumed_req_ids=set(), num_output_tokens=[5] * requests
        ),
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
    return SimpleNamespace(
        schedule=lambda: output,
        update_from_output=lambda _output, _model: None,
        add_request=lambda _: None,
        finish_requests=lambda *_: None,
        get_request_counts=lambda: (requests, 0),
        requests=by_id,
        running=list(by_id.values()),
        waiting=(),
        finished_req_ids=set(),
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(num_gpu_blocks=10_001, get_num_free_blocks=lambda: 5000)
        ),
    )


def drive(scheduler: Any, steps: int) -> tuple[float, list[float]]:
    """Return the thread's CPU us per step and each step's wall us."""
    walls = []
    begin_ns = time.thread_time_ns()
    for _ in range(steps):
        start_ns = time.perf_counter_ns()
        scheduler.update_from_output(scheduler.schedule(), None)
        walls.append((time.perf_counter_ns() - start_ns) / 1000)
    return (time.thread_time_ns() - begin_ns) / steps / 1000, walls


def measure(requests: int, tokens_of: Callable[[int], int], steps: int) -> tuple[float, float, float, float]:
    """Return hook CPU, hook p50, hook p99 and encoding CPU, us per step."""
    bare, _ = drive(scheduler_of(requests, tokens_of), steps)
    scheduler = scheduler_of(requests, tokens_of)
    sink = KeepLast()
    if not Tap(scheduler, Settings(), sink, random.Random(1)).attach():
        raise SystemExit("the tap did not attach")
    drive(scheduler, 200)
    sink.items.clear()
    hooked, walls = drive(scheduler, steps)
    encoder = Encoder({"service.name": "bench"}, 1.0)
    begin_ns = time.thread_time_ns()
    for at in range(0, len(sink.items), 256):
        encoder.request(sink.items[at : at + 256], {})
    encoding = (time.thread_time_ns() - begin_ns) / steps / 1000
    cuts = statistics.quantiles(walls, n=100)
    return hooked - bare, cuts[49], cuts[98], encoding


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    print(f"{'mix':>16} {'requests':>8} {'hook CPU':>9} {'p50':>7} {'p99':>7} {'encoding CPU':>13}   us per step")
    for mix, tokens_of in MIXES.items():
        for requests in (1, 16, 64, 256):
            cpu, p50, p99, encoding = measure(requests, tokens_of, steps)
            print(f"{mix:>16} {requests:>8} {cpu:>9.1f} {p50:>7.1f} {p99:>7.1f} {encoding:>13.1f}")


if __name__ == "__main__":
    main()
