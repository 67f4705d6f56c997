"""`tracefit predict | plan | show | diff` as a user calls them: on a file, and on a server that wants a token."""

import json

import pytest

from collector.cli import main
from tests.support.page_server import PageServer
from tests.tracefit.example_snapshot import encoded


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / "snapshot.json"
    path.write_bytes(encoded())
    return str(path)


@pytest.fixture
def for_blis(tmp_path):
    """The options of an export that the snapshot's facts leave to be said."""
    model = tmp_path / "config.json"
    model.write_text('{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}')
    return ["--format", "blis-flags", "--hardware", "H100", "--model-config", str(model)]


@pytest.fixture
def address():
    def answer(*_):
        accepted = server.asked[-1][1].get("Authorization") == "Bearer secret"
        return (200, {}, encoded()) if accepted else (401, {}, b"no")

    with PageServer(answer) as server:
        yield f"http://127.0.0.1:{server.port}"


def test_a_step_and_a_load_are_predicted_from_a_file(snapshot, capsys):
    assert main(["predict", snapshot, "--requests", "20", "--prefill", "512", "--context", "30000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["us"] == pytest.approx(35_679, abs=1)
    assert main(["predict", snapshot, "--prompt", "2000", "--output", "300", "--concurrency", "20"]) == 0
    assert "ITL       20.6 ms" in capsys.readouterr().out


def test_a_plan_reads_times_with_their_units(snapshot, capsys):
    assert main(["plan", snapshot, "--prompt", "2000", "--output", "300", "--itl", "30ms", "--ttft", "1s"]) == 0
    assert "fits      34 requests in flight" in capsys.readouterr().out


def test_a_snapshot_is_shown_and_compared_with_itself(snapshot, capsys):
    assert main(["show", snapshot]) == 0
    assert main(["diff", snapshot, snapshot]) == 0
    assert "MOVED" not in capsys.readouterr().out


def test_a_running_sidecar_is_asked_by_its_address_and_with_its_token(address, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("secret\n")
    assert main(["show", address, "--token-file", str(token)]) == 0
    assert main(["show", address]) == 1
    assert "token" in capsys.readouterr().err


def test_an_export_of_a_running_sidecar_is_that_of_its_file(address, snapshot, for_blis, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("secret\n")
    said = []
    for source in ([snapshot], [address, "--token-file", str(token)]):
        assert main(["export", *source, *for_blis, "--which", "LLAMA · H100"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["export", address, *for_blis]) == 1
    assert "wants a token" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["0f3c", "llama h100", "Llama-3-8B"])
@pytest.mark.parametrize("question", ["predict --requests 8", "plan --prompt 9 --output 9 --itl 1s", "show", "export"])
def test_a_configuration_is_meant_in_one_way_by_every_command(snapshot, for_blis, which, question, capsys):
    command, *options = question.split()
    options += for_blis if command == "export" else []
    assert main([command, snapshot, *options, "--which", which]) == 0
    capsys.readouterr()
    assert main([command, snapshot, *options, "--which", f"{which} a100"]) == 1
    assert "--which: no configuration fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["predict", "SNAPSHOT"], 2, "--prompt: missing: give a load"),
        (["predict", "SNAPSHOT", "--prefill", "3"], 2, "--requests"),
        (["predict", "SNAPSHOT", "--requests", "3", "--output", "3"], 2, "--output: a load"),
        (["predict", "SNAPSHOT", "--output", "3"], 2, "--prompt"),
        (["predict", "SNAPSHOT", "--requests", "nan"], 2, "requests"),
        (["predict", "SNAPSHOT", "--requests", "1e12"], 2, "requests"),
        (["plan", "SNAPSHOT", "--prompt", "3", "--output", "3", "--itl", "3 weeks"], 2, "--itl"),
        (["plan", "SNAPSHOT", "--prompt", "-3", "--output", "3", "--itl", "30ms"], 2, "--prompt: expected 1"),
        (["show", "SNAPSHOT", "--which", "zzz"], 1, "zzz"),
        (["show", "/nowhere/snapshot.json"], 1, "/nowhere/snapshot.json"),
        (["show", "SNAPSHOT", "--token-file", "/nowhere/token"], 1, "/nowhere/token"),
    ],
)
def test_a_question_that_makes_no_sense_is_one_sentence(snapshot, capsys, arguments, code, said):
    assert main([snapshot if word == "SNAPSHOT" else word for word in arguments]) == code
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
