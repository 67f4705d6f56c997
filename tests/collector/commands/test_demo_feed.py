"""The demo's feed: stamps move by one constant per clock, durations stay, only the sending is faster."""

from itertools import islice

import pytest

from collector.commands.demo import Slowdown, find_recording, forget_last_run, read_tape, schedule
from collector.decode import Export
from tests.support.clocks import FakeClock
from tests.support.gpu_server import StepTimes
from tests.support.pipelines import replayed
from tests.support.vllm_scheduler import Host
from tracefit import load


def test_the_gpu_of_the_demo_is_learned_as_its_table_has_it(data_dir):
    sendings = islice(schedule(read_tape(find_recording(gpu=True)), 1.0, FakeClock(), engine="mine"), 68)
    pipeline = replayed((Export(each.payload, "", 1) for each in sendings), batch=64)
    config = load(pipeline.snapshot(1, 1).to_json()).config("llama H100")
    assert (config.telemetry, config.usable) == ("steps+", True)
    times, host = StepTimes(data_dir / "gpu_step_times.json", "llama8b-h100"), Host()
    for prompt, requests, context in [(0, 8, 300), (0, 64, 500), (0, 128, 400), (300, 128, 400), (900, 4, 900)]:
        step = config.step_time(prefill_tokens=prompt, requests=requests, decode_context_tokens=requests * context)
        host_us = host.schedule_us + host.output_us + host.launch_us + requests * host.per_request_us
        assert step.us == pytest.approx(times.us(prompt, requests, context) + host_us, rel=0.08)
    assert [emitter.instance for emitter in pipeline.joiner.emitters] == ["mine"]


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_slower_reads_of_the_kv_cache_are_one_change_of_that_term(factor):
    sendings = schedule(read_tape(find_recording(gpu=True)), 1.0, FakeClock(), Slowdown(kv_reads=factor))
    pipeline = replayed((Export(each.payload, "", 1) for each in sendings), batch=64)
    drift = pipeline.snapshot(1, 1).configs[0].targets["step_time"].drift
    assert (drift.count, drift.term) == (1, "decode_context_tokens")


def test_a_second_demo_begins_with_nothing_learned(tmp_path):
    """The same span ids come again: a state that remembered them would learn nothing."""
    for name in ("state.bin", "snapshot.json", "mine.txt"):
        (tmp_path / name).write_bytes(b"of the last run")
    forget_last_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
