"""``tracefit export``: what BLIS loads out of a snapshot or a recording, or one sentence."""

import csv
import json

import msgspec
import pytest
import yaml

from collector.cli import main
from tests.support import exporter_cases as cases
from tests.support.paths import DATA

MODEL = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
MODEL["time_step_limit"] = [0.0, float("inf")]  # as transformers writes it for models with Mamba layers


@pytest.fixture
def export(tmp_path, capsys):
    """Export one of the snapshots of two configurations, of doubtful coefficients and of request spans."""
    both = cases.snapshot(cases.config(), cases.config("aaaaaaaaaaaa"))
    doubtful = json.loads(cases.snapshot().to_json())
    targets = doubtful["configs"][0]["targets"]
    for name, place, status in (
        ("step_time", 3, "weak"),
        ("post_decode", 1, "constant\x1b[31m\n"),
        ("first_response", 0, "prior_only"),
    ):
        targets[name]["models"]["portable"]["features"][place]["status"] = status
    spans = msgspec.structs.replace(cases.config(telemetry="requests"), prefix_hits_hidden=True)
    contents = {"both": both.to_json(), "doubtful": json.dumps(doubtful).encode()}
    contents |= {"spans": cases.snapshot(spans).to_json(), "model": json.dumps(MODEL).encode()}
    contents |= {"no_json": b"{", "no_object": b"[]", "deep": b"[" * 100_000}
    files = {name: str(tmp_path / f"{name}.json") for name in contents}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_bytes(content)

    def run(snapshot, options="", form="blis-flags"):
        words = ["export", files[snapshot], "--format", form, "--model-config", files["model"]]
        return (main([*words, *options.format(**files).split()]), *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "error: --which: several configurations fit"),
        ("--which ffff", "error: --which: no configuration fits 'ffff'"),
        ("--which 0f3c --hardware abacus", "error: --hardware: memory bandwidth of 'abacus' is not known"),
        *((f"--which 0f3c --model-config {{{name}}}", "--model-config") for name in ("no_json", "no_object", "deep")),
    ],
)
def test_what_is_missing_or_not_good_enough_is_one_sentence_and_no_file(export, options, said):
    code, out, noted = export("both", options)
    assert (code, out, noted.count("\n")) == (1, "", 1)
    assert said in noted


def test_the_flags_are_one_line_without_a_warning_where_all_is_identified(export):
    first_alphas = []
    for alpha in ("server", "effective"):
        code, out, noted = export("both", f"--which 0f3c --alpha {alpha} --out -")
        assert (code, out.count("\n"), noted) == (0, 1, "")
        first_alphas.append(int(out.split()[1].split(",")[0]))
    assert first_alphas[0] < first_alphas[1]


@pytest.mark.parametrize("form", ["blis-yaml", "blis-flags"])
def test_what_should_be_known_of_the_file_is_warned_of(export, form):
    code, out, noted = export("doubtful", form=form)
    weak, constant = noted.splitlines()
    comment = "not identified: step_time requests: weak, 1.30 ms/request ± 3.1 %"
    assert weak == f"warning: {comment}"
    assert constant.startswith("warning: not identified: post_decode output_tokens: constant")
    assert "\x1b" not in constant
    assert (code, f"# {comment}" in out) == (0, form == "blis-yaml")
    assert "warning: the telemetry hides prefix-cache hits: 580 µs per prompt token" in export("spans", form=form)[2]


def table(data):
    return list(csv.DictReader(data.decode().splitlines()))


def test_every_request_of_a_recording_is_in_the_trace_once(tmp_path, capsys):
    header, data = tmp_path / "trace" / "trace.yaml", tmp_path / "trace" / "trace.csv"
    recording = str(DATA / "c1_mixed" / "otlp.pb.gz")
    assert main(["export", recording, "--format", "blis-trace", "--out", str(tmp_path / "trace")]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"--trace-header {header} --trace-data {data}\n"
    rows = table(data.read_bytes())
    assert len(rows) == 156
    arrivals = [int(row["arrival_time_us"]) for row in rows]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    for row in rows:
        assert int(row["output_tokens"]) > 0
        assert int(row["arrival_time_us"]) < int(row["first_chunk_time_us"]) <= int(row["last_chunk_time_us"])
    assert yaml.safe_load(header.read_bytes())["trace_version"] == 2
