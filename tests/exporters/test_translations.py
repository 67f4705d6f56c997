"""Files for programs that do not read coefficients: what they say is what the client says, and what is lost is told."""

from __future__ import annotations

import csv
import io
import math

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import tracefit
from collector.cli import main
from exporters.files import Assumptions, ExportError, render_csv, render_dynamo, render_llm_d_sim
from exporters.files.dynamo import DECODE_FILE, MOCKER_FILE, NOTE_FILE, PREFILL_FILE
from exporters.files.llm_d_sim import simulated_ms, simulator_latency
from online import Snapshot
from tests.support import exporter_cases as cases
from tests.tracefit.example_snapshot import encoded, tree

SNAPSHOT = Snapshot.from_json(encoded())
CONFIG = SNAPSHOT.configs[0]
CLIENT = tracefit.load(encoded()).config()
KEYS = {
    "port", "model", "max-num-seqs", "latency-calculator", "prefill-overhead", "prefill-time-per-token",
    "inter-token-latency", "inter-token-latency-std-dev", "time-factor-under-load",
}  # fmt: skip


def bent(edit):
    changed = tree()
    edit(changed["configs"][0])
    return Snapshot.from_json(encoded(changed))


def without(*facts):
    def edit(config):
        for name in facts:
            config["config"].pop(name)

    return bent(edit)


def simulator(snapshot=SNAPSHOT, **assumed):
    text = render_llm_d_sim(snapshot, snapshot.configs[0], Assumptions(**assumed)).decode()
    return yaml.safe_load(text), text


def dynamo(snapshot=SNAPSHOT, **assumed):
    files = render_dynamo(snapshot, snapshot.configs[0], Assumptions(**assumed))
    return {name: np.load(io.BytesIO(data)) for name, data in files.items() if name.endswith(".npz")} | {
        NOTE_FILE: files[NOTE_FILE].decode()
    }


# ------------------------------------------------------------------- llm-d-inference-sim


def test_the_simulators_file_has_its_keys_in_its_units():
    file, _ = simulator()
    assert set(file) == KEYS
    assert file["latency-calculator"] == "per-token"
    assert (file["model"], file["max-num-seqs"]) == ("meta-llama/Llama-3-8B", 128)
    for key in ("prefill-overhead", "inter-token-latency", "inter-token-latency-std-dev"):
        assert file[key].removesuffix("ms").isdigit(), "whole milliseconds"
    assert file["prefill-time-per-token"] == "43us"
    assert file["time-factor-under-load"] >= 1.0


MIXES = [(1500, 300, 0.0), (2000, 300, 0.0), (200, 200, 0.0), (8000, 100, 0.5), (100, 1000, 0.0), (500, 2, 0.9)]


@pytest.mark.parametrize(("prompt", "output", "hit"), MIXES)
def test_the_simulator_waits_between_tokens_as_the_coefficients_say(prompt, output, hit):
    latency = simulator_latency(CLIENT, prompt, output, hit)
    assert latency.worst < 0.1
    for n in (1, 8, latency.max_num_seqs):
        own = CLIENT.request(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, concurrency=n)
        assert simulated_ms(latency.itl_ms, latency.load_factor, n, latency.max_num_seqs) == pytest.approx(
            own.itl.ms, rel=0.1
        )


def test_a_line_that_can_hold_the_ends_within_a_tenth_is_found():
    small = CLIENT.assuming(max_num_batched_tokens=512, max_num_seqs=64, kv_tokens=10**8)
    assert simulator_latency(small, 3000, 300, 0.0).worst < 0.1


def test_its_first_token_comes_as_the_coefficients_say_when_nobody_else_is_there():
    latency = simulator_latency(CLIENT, 1500, 300, 0.0)
    for prompt in (400, 1500, 3000):
        own = CLIENT.request(prompt_tokens=prompt, output_tokens=300).ttft.ms
        assert latency.prefill_overhead_ms + prompt * latency.prefill_us_per_token / 1e3 == pytest.approx(own, rel=0.1)


def test_what_the_kv_cache_cannot_hold_does_not_run_in_the_simulator_either():
    file, text = simulator(kv_tokens=20_000)
    assert file["max-num-seqs"] < 12
    assert "of 128 the KV cache holds so many" in text


def test_what_is_lost_stands_in_the_file():
    _, text = simulator()
    assert text.count("# lost: ") == 3
    assert "for requests of 1500 prompt and 300 output tokens" in text
    assert "worst of 1, 8 and 128 running" in text


@pytest.mark.parametrize(
    ("snapshot", "assumed", "said"),
    [
        (without("max_num_seqs"), {}, "--max-num-seqs: "),
        (bent(lambda c: c["targets"].pop("api_queueing")), {}, "--prompt: "),
        (bent(lambda c: c["targets"].pop("post_decode")), {}, "--output: "),
        (bent(lambda c: c["targets"].pop("step_time")), {}, "has learned nothing about step_time"),
        (bent(lambda c: c.update(quarantined="it raised")), {}, "quarantined"),
        (SNAPSHOT, {"prompt_tokens": math.nan}, "prompt_tokens: "),
        (SNAPSHOT, {"prompt_tokens": -5.0}, "prompt_tokens: "),
        (SNAPSHOT, {"output_tokens": 1e12}, "output_tokens: "),
        (SNAPSHOT, {"prefix_hit": 1.5}, "prefix_hit: "),
        (SNAPSHOT, {"max_num_seqs": 0}, "max_num_seqs: "),
        (SNAPSHOT, {"kv_tokens": 100}, "prompt_tokens: not even one such request fits"),
    ],
)
def test_what_is_missing_is_one_sentence(snapshot, assumed, said):
    with pytest.raises(ExportError, match=said):
        render_llm_d_sim(snapshot, snapshot.configs[0], Assumptions(**assumed))


def test_coefficients_that_should_not_be_used_are_exported_with_a_word():
    def young(config):
        config["targets"]["step_time"]["models"]["portable"]["rows"] = 40

    assert "# not usable yet: learned from 40 rows" in simulator(bent(young))[1]


@pytest.mark.parametrize("name", ['"}\nport: 1', "a\nb: c", "\u2028x", "y: [", "🚀", "no"])
def test_no_model_name_becomes_a_key(name):
    file, text = simulator(bent(lambda config: config["config"].update(model=name)))
    assert set(file) == KEYS
    assert file["model"] == name
    assert all(line.startswith(("#", *KEYS)) for line in text.split("\n")[:-1])


@settings(max_examples=40, deadline=None)
@given(
    intercept=st.floats(4_500, 1e5),
    per_request=st.floats(0, 2_000),
    per_context=st.floats(0, 1),
    per_prefill=st.floats(0, 200),
    slots=st.integers(1, 512),
)
def test_any_machine_gives_a_file_that_starts(intercept, per_request, per_context, per_prefill, slots):
    def machine(config):
        values = (intercept, per_prefill, per_context, per_request)
        for feature, value in zip(
            config["targets"]["step_time"]["models"]["portable"]["features"], values, strict=True
        ):
            feature["coefficient"] = value
        config["targets"]["step_time"].pop("shape_factors", None)
        config["config"]["max_num_seqs"] = slots

    file, _ = simulator(bent(machine))
    assert int(file["inter-token-latency"].removesuffix("ms")) >= 1
    assert file["time-factor-under-load"] >= 1.0
    assert 1 <= file["max-num-seqs"] <= slots


# ------------------------------------------------------------------- csv


def test_every_coefficient_is_a_line_with_full_precision():
    snapshot = cases.snapshot(cases.config(), cases.config("aaaaaaaaaaaa"))
    text = render_csv(snapshot, snapshot.configs).decode()
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert any(line.startswith("# lost: ") for line in head)
    lines = list(csv.DictReader(text.splitlines()[len(head) :]))
    wanted = {
        (config.config_id, target, feature_set, feature.name): feature.coefficient
        for config in snapshot.configs
        for target, each in config.targets.items()
        for feature_set, model in each.models.items()
        for feature in model.features
    }
    found = {
        (line["config_id"], line["target"], line["feature_set"], line["feature"]): float(line["coefficient"])
        for line in lines
    }
    assert found == wanted


@pytest.mark.parametrize("name", ['=HYPERLINK("x")', "@SUM(A1)", "+1", "-1", 'a,b"c', "a\nb", "\ud800"])
def test_no_model_name_becomes_a_formula_or_another_field(name):
    config = msgspec.structs.replace(cases.config(), config={"model": name})
    text = render_csv(cases.snapshot(config), [config]).decode()
    lines = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    assert lines
    for line in lines:
        assert None not in line
        assert not line["model"].startswith(("=", "+", "-", "@"))


# ------------------------------------------------------------------- dynamo


def test_the_planners_points_are_the_clients_steps():
    files = dynamo()
    decode = files[DECODE_FILE]
    (kv_max,) = decode["max_kv_tokens"]
    assert kv_max == 416_000
    columns = [decode[name] for name in ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")]
    assert len({each.shape for each in columns}) == 1
    factor = CLIENT.mean_factor
    for usage, context, itl_ms, per_s in zip(*columns, strict=True):
        batch = usage * kv_max / context
        assert 0.0 < usage <= 1.0
        assert batch == pytest.approx(round(batch))
        assert 1 <= round(batch) <= 128
        step = CLIENT.step_time(requests=round(batch), decode_context_tokens=usage * kv_max)
        assert itl_ms == pytest.approx(step.us * factor / 1e3)
        assert per_s == pytest.approx(batch / itl_ms * 1e3)


def test_the_planners_prefills_are_the_clients_first_tokens():
    prefill = dynamo()[PREFILL_FILE]
    for length, ttft_ms in zip(prefill["prefill_isl"], prefill["prefill_ttft"], strict=True):
        alone = CLIENT.assuming(kv_tokens=10**9).request(prompt_tokens=float(length), output_tokens=1)
        assert ttft_ms == pytest.approx(alone.ttft.ms)
    assert np.all(np.diff(prefill["prefill_isl"]) > 0)


def test_the_mockers_table_is_looked_up_by_binary_search():
    table = dynamo()[MOCKER_FILE]
    kv_axis, context_axis, itl_ms = (
        table[name] for name in ("decode_active_kv_tokens", "decode_context_length", "decode_itl")
    )
    assert itl_ms.shape == (len(kv_axis), len(context_axis))
    assert np.all(np.diff(kv_axis) > 0)
    assert np.all(np.diff(context_axis) > 0)
    rng, factor = np.random.default_rng(3), CLIENT.mean_factor
    errors = []
    for _ in range(500):
        context, batch = float(rng.uniform(500, 30_000)), int(rng.integers(1, 129))
        if context * batch < kv_axis[-1]:
            looked_up = itl_ms[np.searchsorted(kv_axis, context * batch), np.searchsorted(context_axis, context)]
            own = CLIENT.step_time(requests=batch, decode_context_tokens=context * batch)
            errors.append(abs(looked_up / (own.us * factor / 1e3) - 1.0))
    assert np.mean(errors) < 0.03


def test_what_nobody_has_seen_is_listed():
    note = dynamo()[NOTE_FILE]
    assert "# lost: steps that prefill and decode at once" in note
    assert "decode points lie inside of what was learned from" in note
    assert note.count("KV usage") > 10


def test_gpus_share_what_a_step_makes():
    def two(config):
        config["config"]["tensor_parallel_size"] = 2

    one, half = dynamo()[DECODE_FILE], dynamo(bent(two))[DECODE_FILE]
    assert half["z_thpt_per_gpu"] * 2 == pytest.approx(one["z_thpt_per_gpu"])
    assert half["z_itl"] == pytest.approx(one["z_itl"])


def test_equal_snapshots_give_equal_files():
    first, second = (render_dynamo(SNAPSHOT, CONFIG, Assumptions()) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("snapshot", "assumed", "said"),
    [
        (without("num_gpu_blocks"), {}, "--kv-tokens: "),
        (SNAPSHOT, {"kv_tokens": 10}, "--kv-tokens: "),
        (SNAPSHOT, {"kv_tokens": 0}, "kv_tokens: "),
        (bent(lambda c: c["targets"].pop("step_time")), {}, "has learned nothing"),
    ],
)
def test_a_directory_that_cannot_be_made_is_one_sentence(snapshot, assumed, said):
    with pytest.raises(ExportError, match=said):
        render_dynamo(snapshot, snapshot.configs[0], Assumptions(**assumed))


@pytest.mark.parametrize("kv_tokens", [32, 1000, 10**9])
@pytest.mark.parametrize("slots", [1, 3, 10**6])
def test_engines_of_any_size_have_a_directory(kv_tokens, slots):
    files = dynamo(kv_tokens=kv_tokens, max_num_seqs=slots)
    for each in (files[DECODE_FILE], files[PREFILL_FILE], files[MOCKER_FILE]):
        for name in each:
            assert np.isfinite(each[name]).all()


# ------------------------------------------------------------------- on the command line


@pytest.fixture
def snapshot_file(tmp_path):
    (tmp_path / "snapshot.json").write_bytes(encoded())
    return tmp_path / "snapshot.json"


def test_the_command_prints_files_and_writes_directories(snapshot_file, capsys):
    assert main(["export", str(snapshot_file), "--format", "llm-d-sim", "--prompt", "200", "--output", "200"]) == 0
    assert "for requests of 200 prompt" in capsys.readouterr().out
    assert main(["export", str(snapshot_file), "--format", "csv"]) == 0
    assert "config_id,model" in capsys.readouterr().out
    out = snapshot_file.parent / "new" / "profile"
    assert main(["export", str(snapshot_file), "--format", "dynamo", "--out", str(out)]) == 0
    assert {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()} == {
        PREFILL_FILE,
        DECODE_FILE,
        MOCKER_FILE,
        NOTE_FILE,
    }


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--format", "dynamo"], 2, "--out: "),
        (["--format", "dynamo", "--out", "/proc/nowhere"], 1, "cannot write"),
        (["--format", "llm-d-sim", "--which", "zzz"], 1, "no configuration fits 'zzz'"),
        (["--format", "csv", "--which", "zzz"], 1, "no configuration fits 'zzz'"),
        (["--format", "llm-d-sim", "--prompt", "1e300"], 1, "prompt_tokens: expected"),
    ],
)
def test_what_goes_wrong_is_one_line(snapshot_file, capsys, options, code, said):
    assert main(["export", str(snapshot_file), *options]) == code
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------- prefix hits that request spans hide


def with_hidden_hits(config):
    config["prefix_hits_hidden"] = True
    for each in config["targets"]["step_time"]["models"]["portable"]["features"]:
        if each["name"] == "prefill_tokens":
            each |= {"status": "weak", "reason": "of a prompt token, cached or computed"}


def test_a_price_of_prompt_tokens_is_told_as_such_in_every_file():
    snapshot = bent(with_hidden_hits)
    said = "prefill_tokens: of a prompt token, cached or computed"
    assert f"# {said}" in render_llm_d_sim(snapshot, snapshot.configs[0], Assumptions(400.0, 200.0)).decode()
    assert said in dynamo(snapshot)[NOTE_FILE]
    text = render_csv(snapshot, snapshot.configs[:1]).decode()
    lines = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    told = {line["feature"]: line["reason"] for line in lines if line["feature_set"] == "portable"}
    assert told["prefill_tokens"] == "of a prompt token, cached or computed"


def test_hits_are_not_taken_off_a_price_that_holds_them_already():
    snapshot = bent(with_hidden_hits)
    with pytest.raises(ExportError, match="--prefix-hit: what a prompt token takes holds the hits"):
        render_llm_d_sim(snapshot, snapshot.configs[0], Assumptions(400.0, 200.0, prefix_hit=0.5))
