"""The demo's feed: stamps move by one constant per clock, durations stay, only the sending is faster."""

from itertools import pairwise

import pytest

from collector.commands.demo import (
    forget_last_run,
    gpu_tape,
)
from collector.commands.gpu import StepTimes
from collector.recordings import Recording
from tests.support.clocks import FakeClock
from tests.support.pipelines import replayed
from tracefit import load


def test_the_gpu_of_the_demo_is_learned_as_its_table_has_it(data_dir):
    (export, *_) = Recording(data_dir / "c1_mixed" / "otlp.pb.gz", print).exports()
    tape = gpu_tape(FakeClock())
    assert all(one.recv_unix_ns < other.recv_unix_ns for (one, _), (other, _) in pairwise(tape))
    pipeline = replayed((export._replace(payload=payload) for _, payload in tape[: len(tape) * 3 // 8]), batch=64)
    config = load(pipeline.snapshot(1, 1).to_json()).config("llama H100")
    assert (config.telemetry, config.usable) == ("steps+", True)
    times = StepTimes(data_dir / "gpu_step_times.json")
    for prompt, requests, context in [(0, 8, 300), (0, 64, 500), (0, 128, 400), (300, 128, 400), (900, 4, 900)]:
        step = config.step_time(prefill_tokens=prompt, requests=requests, decode_context_tokens=requests * context)
        assert step.us == pytest.approx(times.us(prompt, requests, context), rel=0.08)


def test_a_second_demo_begins_with_nothing_learned(tmp_path):
    """The same span ids come again: a state that remembered them would learn nothing."""
    for name in ("state.bin", "snapshot.json", "mine.txt"):
        (tmp_path / name).write_bytes(b"of the last run")
    forget_last_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
