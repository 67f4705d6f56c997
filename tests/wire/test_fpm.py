"""Records of forward passes: as messages and out of files into a replay, and whatever else may come."""

import json
from functools import cache

import msgspec
import pytest

from collector.decode import Export
from collector.decode.fpm import read_line, read_record
from collector.telemetry import Counts, JoinEvent, Skip, table
from online import Target
from tests.support.clocks import T0_NS
from tests.support.gpu_kernels import fpm_record
from tests.support.gpu_server import serve, step_exports
from tests.support.pipelines import new_pipeline, restarted
from tests.support.vllm_scheduler import Work
from tests.support.vllm_senders import fpm_lines, span_exports, write, write_lines
from tests.wall.published import replay

MACHINE = "llama8b-h100"
BUSY = fpm_record(Work(decodes=3, decode_context=900), 0.02)


@pytest.fixture(autouse=True)
def _one_learner(monkeypatch):
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")


@cache
def engine():
    return serve(MACHINE, 60.0, 11)


@cache
def records():
    return [json.loads(line) for line in fpm_lines(engine())]


encode = msgspec.msgpack.encode


def changed(**keys):
    return {key: value for key, value in {**BUSY, **keys}.items() if value is not None}


def scheduled(**keys):
    return changed(scheduled_requests={**BUSY["scheduled_requests"], **keys})


def beta_of(snapshot):
    (config,) = json.loads(snapshot.read_bytes())["configs"]
    features = config["targets"]["step_time"]["models"]["portable"]["features"]
    return config["telemetry"], {each["name"]: (each["coefficient"], each["stderr"]) for each in features}


def test_a_file_of_records_teaches_what_the_plugins_steps_of_the_same_server_teach(tmp_path):
    files = {
        "steps+": write(tmp_path / "otlp.pb.gz", step_exports(MACHINE, engine())),
        "fpm": write_lines(tmp_path / "fpm.jsonl.gz", fpm_lines(engine())),
    }
    learned = {}
    for name, path in files.items():
        replay(tmp_path / "snapshot.json", path)
        quality, learned[name] = beta_of(tmp_path / "snapshot.json")
        assert quality == name
    for name, (coefficient, stderr) in learned["steps+"].items():
        assert learned["fpm"][name][0] == pytest.approx(coefficient, abs=0.3 * stderr), name


def in_envelope(record, unix_ms):
    event = {"schema": "dynamo.fpm.trace.v1", "source": {"component": "backend"}, "capture_mode": "full"}
    return {"timestamp": 1250, "event": {**event, "observed_at_unix_ms": unix_ms, "fpm": record}}


def test_segments_of_a_trace_of_dynamo_are_one_source_and_teach_what_their_records_teach(tmp_path):
    now_ms, lines = T0_NS / 1e6, []
    for record in records():
        now_ms += 1e3 * record["wall_time"]
        lines.append(json.dumps(in_envelope(record, round(now_ms))))
    half = len(lines) // 2
    segments = [
        write_lines(tmp_path / f"dynamo-fpm.4192.{number:06}.jsonl.gz", part)
        for number, part in enumerate((lines[:half], lines[half:]))
    ]
    replay(tmp_path / "traced.json", *reversed(segments))
    replay(tmp_path / "plain.json", write_lines(tmp_path / "fpm.jsonl.gz", map(json.dumps, records())))
    learned, plain = (beta_of(tmp_path / name)[1] for name in ("traced.json", "plain.json"))
    for name, (coefficient, stderr) in plain.items():
        assert learned[name][0] == pytest.approx(coefficient, abs=0.1 * stderr), name
    assert read_line(json.dumps(in_envelope(None, 1)).encode(), "r") == Skip.INVALID
    assert read_line(json.dumps(in_envelope(BUSY, 2**63)).encode(), "r") == Skip.INVALID


SENSELESS = {
    Skip.UNKNOWN_SCOPE: [changed(version=2), changed(timing_scope="moon")],
    Skip.INVALID: [
        *(changed(wall_time=value) for value in (None, float("nan"), float("inf"), -1.0)),
        *(changed(**{key: value}) for key, value in (("counter_id", 2**63), ("dp_rank", -1), ("worker_id", "w" * 257))),
        scheduled(sum_prefill_tokens=2**63),
        *(scheduled(num_decode_requests=value) for value in (-1, "3")),
        *([1, 2], "text"),
    ],
    Skip.UNDECODABLE: [b"\xc1"],
}


@pytest.mark.parametrize(("reason", "record"), [(reason, each) for reason in SENSELESS for each in SENSELESS[reason]])
def test_a_record_that_makes_no_sense_is_left_out_by_reason(record, reason):
    is_raw = isinstance(record, bytes)
    assert read_record(record if is_raw else encode(record), 1) == reason
    if reason is not Skip.INVALID:
        assert read_line(record if is_raw else json.dumps(record).encode(), "r") == reason


def test_keys_of_a_later_version_are_passed_over_and_who_and_what_was_timed_is_told():
    record = changed(later=[1], dp_rank=3, worker_id="w", timing_scope="gpu")
    passed = read_record(encode(record), 7, source="tcp://a:1")
    assert (passed.instance, passed.target, passed.unix_ns) == ("w/dp3", Target.GPU_TIME, 7)
    assert read_record(encode(changed()), 7, times="gpu").target is Target.GPU_TIME
    for scope in ("model_step_cuda", "execute_model_cuda"):  # as vLLM's own records have it
        assert read_record(encode(changed(timing_scope=scope)), 7).target is Target.GPU_TIME
    assert read_record(encode(changed(worker_id="")), 7, source="tcp://a:1").instance == "tcp://a:1"
    assert read_record(encode(record), 7, instance="pod-1", source="tcp://a:1").instance == "pod-1"


class House:
    """A pipeline that is told of records."""

    def __init__(self):
        self.pipeline, self.events, self.now = new_pipeline(), [], 10**18
        self.pipeline.on_event = self.events.append

    def tell(self, *records, source="tcp://a:1", times="host"):
        passes = []
        for record in records:
            self.now += round(record["wall_time"] * 1e9)
            passes.append(read_record(encode(record), self.now, times, source=source))
        self.pipeline.process(passes=passes)

    def counts(self):
        self.pipeline.flush()
        counts = Counts(self.pipeline.take_counts())
        return {event: counts[table.JOIN_EVENTS, event] for event in JoinEvent if counts[table.JOIN_EVENTS, event]}

    def rows(self):
        snapshot = self.pipeline.snapshot(self.now, 1)
        return {
            (engine.instance, name): target.models["portable"].rows
            for config in snapshot.configs
            for engine in config.engines
            for name, target in config.targets.items()
        }


def test_gaps_repetitions_and_starts_are_told_by_the_engines_own_count():
    house = House()
    numbered = [{**record, "counter_id": number} for number, record in enumerate(records()[:400])]
    house.tell(*numbered[:200], *numbered[199:300], *numbered[310:], *numbered[:50])
    assert house.counts() == {
        JoinEvent.DUPLICATE: 1,
        JoinEvent.MISSING: 10,
        JoinEvent.ENGINE_RESTART: 1,
    }


def test_what_the_gpu_was_busy_is_never_mixed_with_the_time_of_a_step():
    house = House()
    house.tell(*records()[:300])
    house.tell(*records()[300:600], times="gpu")
    house.pipeline.flush()
    assert {name for _, name in house.rows()} == {"step_time", "gpu_time"}


def test_request_spans_beside_passes_tell_of_requests_and_not_of_steps_once_more():
    house, alone = House(), House()
    alone.tell(*records())
    house.now = T0_NS  # the spans' clock
    house.tell(*records())
    house.pipeline.process([Export(payload, "peer", 1) for payload in span_exports(engine(), {})])
    alone.pipeline.flush()
    house.pipeline.flush()
    rows = house.rows()
    assert rows.keys() == {("bench", "step_time"), ("bench", "queue_wait"), ("bench", "api_queueing")}
    assert rows["bench", "step_time"] == alone.rows()["bench", "step_time"]
    assert rows["bench", "api_queueing"] > 100


def test_what_the_gpu_was_busy_leaves_the_steps_to_those_who_tell_of_them():
    house = House()
    house.now = T0_NS
    house.tell(*records(), times="gpu")
    house.pipeline.process([Export(payload, "peer", 1) for payload in span_exports(engine(), {})])
    house.pipeline.flush()
    assert {name for _, name in house.rows()} >= {"gpu_time", "step_time", "queue_wait"}


def test_a_restart_knows_which_time_the_passes_tell():
    for times, is_told in (("gpu", False), ("host", True)):
        house = House()
        house.tell(BUSY, times=times)
        (kept,) = restarted(house.pipeline).joiner.pass_engines.values()
        assert kept.times_steps is is_told


def test_two_publishers_under_one_name_are_two_engines():
    house = House()
    for start in range(0, 300, 50):
        house.tell(*records()[start : start + 50])
        house.tell(*records()[start : start + 50], source="tcp://b:1")
    assert JoinEvent.ENGINE_RESTART not in house.counts()
    assert {instance for instance, _ in house.rows()} == {"bench", "bench (tcp://b:1)"}
