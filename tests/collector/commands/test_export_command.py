"""``tracefit export``: what BLIS loads out of a snapshot file, or one sentence."""

from __future__ import annotations

import json

import msgspec
import pytest

from collector.cli import main
from tests.support import exporter_cases as cases

MODEL = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}


@pytest.fixture
def files(tmp_path):
    """A snapshot of two configurations and the model's config.json."""
    snapshot = cases.snapshot(cases.config(), cases.config("aaaaaaaaaaaa"))
    (tmp_path / "snapshot.json").write_bytes(snapshot.to_json())
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def export(files, *options, form="blis-yaml", snapshot="snapshot.json"):
    return main(["export", str(files / snapshot), "--format", form, *options])


def test_the_flags_are_one_line_and_effective_alphas_are_larger(files, capsys):
    model = ["--which", "0f3c", "--model-config", str(files / "config.json"), "--hardware", "H100"]
    assert export(files, *model, form="blis-flags") == 0
    server = capsys.readouterr().out
    assert export(files, *model, "--alpha", "effective", form="blis-flags") == 0
    effective = capsys.readouterr().out
    assert server.count("\n") == effective.count("\n") == 1
    first_alpha = [int(text.split()[1].split(",")[0]) for text in (server, effective)]
    assert first_alpha[0] < first_alpha[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--which: several configurations fit"),
        (["--which", "ffff"], "--which: no configuration fits 'ffff'"),
        (["--which", "0f3c", "--hardware", "abacus"], "--hardware: memory bandwidth of 'abacus' is not known"),
    ],
)
def test_what_is_missing_is_one_sentence_that_names_the_option(files, capsys, options, sentence):
    assert export(files, *options, "--model-config", str(files / "config.json")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


@pytest.fixture
def doubtful(files):
    """A snapshot of which two coefficients are not identified."""
    tree = json.loads((files / "snapshot.json").read_bytes())
    tree["configs"] = tree["configs"][:1]
    targets = tree["configs"][0]["targets"]
    targets["step_time"]["models"]["portable"]["features"][3]["status"] = "weak"
    targets["post_decode"]["models"]["portable"]["features"][1]["status"] = "constant\x1b[31m\n"
    targets["first_response"]["models"]["portable"]["features"][0]["status"] = "prior_only"
    (files / "doubtful.json").write_text(json.dumps(tree))
    return ["--model-config", str(files / "config.json"), "--hardware", "H100"]


@pytest.mark.parametrize("form", ["blis-yaml", "blis-flags"])
def test_each_coefficient_that_is_not_identified_is_warned_of_by_name(files, doubtful, capsys, form):
    assert export(files, *doubtful, snapshot="doubtful.json", form=form) == 0
    captured = capsys.readouterr()
    warnings = captured.err.splitlines()
    assert [line.startswith("warning: not identified: ") for line in warnings] == [True, True]
    assert "step_time requests: weak, 1300 ± 40 µs/request" in warnings[0]
    assert "post_decode output_tokens: constant" in warnings[1]
    assert "\x1b" not in captured.err
    assert ("step_time requests: weak" in captured.out) == (form == "blis-yaml")


def test_identified_can_be_required(files, doubtful, capsys):
    required = (*doubtful, "--require", "identified")
    assert export(files, *required, snapshot="doubtful.json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: --require identified: 2 not: step_time requests")
    assert export(files, "--which", "0f3c", *required) == 0
    assert capsys.readouterr().err == ""
    assert export(files, *required, "--alpha", "effective", snapshot="doubtful.json") == 1
    assert "3 not" in capsys.readouterr().err, "one more is exported"


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_model_config_that_is_none_is_one_sentence(files, capsys, content):
    (files / "broken.json").write_text(content)
    assert export(files, "--which", "0f3c", "--model-config", str(files / "broken.json")) == 1
    assert "--model-config" in capsys.readouterr().err


def test_a_file_of_request_spans_warns_of_hits_that_they_hide(files, capsys):
    config = msgspec.structs.replace(cases.config(telemetry="requests"), prefix_hits_hidden=True)
    (files / "spans.json").write_bytes(cases.snapshot(config).to_json())
    for form in ("blis-yaml", "blis-flags"):
        assert export(files, "--model-config", str(files / "config.json"), form=form, snapshot="spans.json") == 0
        assert "warning: request spans hide prefix-cache hits: 580 µs per prompt token" in capsys.readouterr().err
