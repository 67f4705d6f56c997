"""Time to the first token of servers that tell no step: what was learned from them beside what clients saw."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import tracefit
from collector.commands.replay import replay
from collector.config.schema import Config
from collector.runtime.tasks import SystemClock
from tests.support.gpu_server import FACTS, LIMITS, request_exports, serve
from tests.support.vllm_scheduler import Engine, Traffic
from tests.support.vllm_senders import page_lines, write, write_lines

SECONDS = 60.0


def learned(engine: Engine, machine: str, source: str, directory: Path) -> tracefit.Config:
    if source == "spans":
        path = write(directory / "spans.pb.gz", request_exports(machine, engine))
    else:
        path = write_lines(directory / "pages.jsonl.gz", page_lines(engine, FACTS[machine][0]))
    out = directory / "snapshot.json"
    replay([path], out, Config(learners=("rls",)), SystemClock())
    config = tracefit.load(out).config()
    return config.assuming(max_num_seqs=LIMITS.max_num_seqs, max_num_batched_tokens=LIMITS.max_num_batched_tokens)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("machine", ["llama8b-h100", "qwen30a3-h200"])
def test_first_tokens_come_a_step_later_where_the_engine_schedules_ahead(machine, asynchronous, tmp_path):
    engine = serve(machine, SECONDS, 21, asynchronous=asynchronous)
    loop = Traffic(22)
    loop.closed(0, int(30e9), 16, 400.0, 150.0, 0.3, 0.0)
    served = serve(machine, 30.0, 23, asynchronous=asynchronous, traffic=loop).requests
    kept = served[len(served) // 4 :]
    first_us = statistics.fmean(each.first_seen - each.sent for each in kept) / 1e3
    for source in ("spans", "pages"):
        said = learned(engine, machine, source, tmp_path).request(
            prompt_tokens=statistics.fmean(each.prompt for each in kept),
            output_tokens=statistics.fmean(each.made for each in kept),
            concurrency=16,
        )
        assert said.ttft.us == pytest.approx(first_us, rel=0.12), source


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompts_that_share_a_step_do_not_look_like_a_step_scheduled_ahead(asynchronous, tmp_path):
    bursts = Traffic(5)
    for second in range(1, 60):
        for _ in range(12 if second % 2 else 1):
            bursts.send(second * 1_000_000_000, *bursts.sizes(500.0, 150.0, 0.5))
    machine = "llama8b-h100"
    engine = serve(machine, 60.0, 5, asynchronous=asynchronous, traffic=bursts)
    queueing = learned(engine, machine, "spans", tmp_path).targets["api_queueing"]
    assert (queueing.step_ahead_us is not None) == asynchronous
