"""`tracefit predict | plan | show | export` as a user calls them: on a file, and on a server that wants a token."""

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


def test_a_running_sidecar_is_asked_by_its_address_and_with_its_token(address, snapshot, for_blis, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("secret\n")
    said = []
    for source in ([snapshot], [address, "--token-file", str(token)]):
        assert main(["show", *source]) == 0
        assert main(["export", *source, *for_blis, "--which", "LLAMA · H100"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    for command in (["show", address], ["export", address, *for_blis]):
        assert main(command) == 1
        assert "wants a token (token=…): give --token-file FILE" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["0f3c", "llama h100", "Llama-3-8B"])
@pytest.mark.parametrize("question", ["predict --requests 8", "plan --prompt 9 --output 9 --itl 1s", "show", "export"])
def test_a_configuration_is_meant_in_one_way_by_every_command(snapshot, for_blis, which, question, capsys):
    command, *options = question.split()
    options += for_blis if command == "export" else []
    assert main([command, snapshot, *options, "--which", which]) == 0
    capsys.readouterr()
    assert main([command, snapshot, *options, "--which", f"{which} a100"]) == 1
    assert "--which: no configuration fits" in capsys.readouterr().err
