"""``tracefit fleet pull``: whose state is taken, what is written, and what is said of the others."""

from functools import partial

import pytest

import tracefit
from collector.cli import main
from collector.commands.ask import read_token
from collector.fleet import pull
from collector.fleet import sources as state_places
from collector.fleet.pull import Puller, pull_once
from collector.fleet.sources import find_targets
from online import Bank, Snapshot
from online.state import VERSION
from tests.support.banks import merge_states
from tests.support.command_lines import spoken
from tests.support.fleets import CONFIG, FACTS, state_of, state_server, step_coefficients
from tests.support.state_files import file_of

TWO = {**FACTS, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def states():
    made = {f"e{n}": state_of(f"engine-{n}", n) for n in range(4)}
    made["slow"] = state_of("engine-slow", 9, gain=1.3)
    made["other"] = state_of("engine-2", 7, config_id="aaaaaaaaaaaa", facts=TWO)
    made["later"] = state_of("engine-0", 0, rows=900)
    return made


@pytest.fixture(scope="module")
def directory(states, tmp_path_factory):
    path = tmp_path_factory.mktemp("pods")
    for name in ("e0", "e1", "e2", "e3", "slow", "other"):
        (path / name).mkdir()
        (path / name / "state.bin").write_bytes(states[name])
        (path / name / "state.bin.previous").write_bytes(b"never looked at")
    return path


def pulled(sources, out, **options):
    """Exit code, what was said, what was noted."""
    return spoken(pull_once, Puller([*map(str, sources)], out, CONFIG, **options))


def test_a_directory_of_states_becomes_one_file_per_configuration(directory, states, tmp_path):
    code, said, noted = pulled([directory], tmp_path / "fleet")
    assert code == 0
    assert said[0] == "6 sources: 6 merged"
    assert said[1].startswith("0f3c52aa9b1e  llama on H100, TP 1: 3,000 step rows, 5 engines")
    (warning,) = noted
    assert warning.startswith("warning: 0f3c52aa9b1e step_time: engine 'engine-slow' takes 1.299 ± 0.0")
    whole = Snapshot.from_json((tmp_path / "fleet" / "snapshot.json").read_bytes())
    assert [each.config_id for each in whole.configs] == ["0f3c52aa9b1e", "aaaaaaaaaaaa"]
    expected = step_coefficients(merge_states([states[name] for name in ("e3", "slow", "e1", "e0", "e2")], CONFIG))
    state = (tmp_path / "fleet" / "states" / "0f3c52aa9b1e.bin").read_bytes()
    assert step_coefficients(state)["0f3c52aa9b1e"] == pytest.approx(expected["0f3c52aa9b1e"], rel=1e-9)
    features = whole.configs[0].targets["step_time"].models["portable"].features
    assert {f.name: f.coefficient for f in features} == step_coefficients(state)["0f3c52aa9b1e"]
    again = Bank(CONFIG)
    again.restore(state)
    assert sorted(again.lineages["0f3c52aa9b1e"].engines) == [*(f"engine-{n}" for n in range(4)), "engine-slow"]
    assert not (tmp_path / "fleet" / ".pull").exists()


def test_of_one_engine_twice_the_newest_is_taken_and_the_other_named(states, tmp_path):
    for name in ("e0", "later", "e1"):
        (tmp_path / f"{name}.bin").write_bytes(states[name])
    (tmp_path / "twin.bin").write_bytes(states["e1"])
    code, said, noted = pulled([tmp_path], tmp_path / "fleet", require=1.0)
    assert code == 0, "an older state of an engine that is there is no source that is missing"
    assert said[0] == "4 sources: 2 merged, 2 same_engine"
    for line, (name, engine) in zip(noted, (("e0", 0), ("twin", 1)), strict=True):
        where = f"{tmp_path / name}.bin: same_engine: engine 'engine-{engine}' of configuration 0f3c52aa9b1e is in"
        assert line.startswith(where)
    whole = Snapshot.from_json((tmp_path / "fleet" / "snapshot.json").read_bytes())
    assert whole.configs[0].targets["step_time"].models["portable"].rows == 1500


def test_what_cannot_be_used_is_named_with_its_reason_and_the_others_are_merged(states, tmp_path, monkeypatch):
    monkeypatch.setattr(state_places, "STATE_BYTES_MAX", 200_000)
    monkeypatch.setattr(pull, "UNPACKED_BYTES", 20 << 20)
    served = {
        "good": states["e0"],
        "also": states["e1"],
        "cut": states["e2"][:-1],
        "page": b"<html>",
        "newer": file_of({"version": VERSION + 1, "parts": {}}),
        "large": b"x" * 200_001,
        "expands": file_of({"version": VERSION, "parts": {"learners": bytes(21 << 20)}}),
        "lies": (200, {"Content-Length": "9" * 12}, b""),
        "odd": (200, {"Content-Length": "-1"}, b""),
        "moved": (301, {"Location": "http://127.0.0.1:1/"}, b""),
        "closed": 401,
        "young": 503,
        "broken": 500,
        "state": 404,
        "empty": Bank(CONFIG).state(),
    }
    with state_server(served) as server:
        sources = [f"http://127.0.0.1:{server.port}/{name}" for name in served]
        sources += ["http://127.0.0.1:9", str(tmp_path / "nowhere.bin")]
        code, said, noted = pulled(sources, tmp_path / "fleet", require=0.1)
    assert code == 0
    assert said[0] == (
        "17 sources: 2 merged, 2 unreachable, 3 refused, 1 unauthenticated, 4 unexpected, 3 too_large, 2 nothing_yet"
    )
    text = "\n".join(noted)
    assert text.count("\n") == 14, "each on one line, whatever came"
    for name, words in {
        "cut": "unexpected: corrupt state file",
        "newer": f"unexpected: state version {VERSION + 1} is not {VERSION}",
        "large": "too_large: larger than",
        "expands": "too_large: it unpacks to more than 20 MiB",
        "lies": "too_large: larger than",
        "moved": "refused: status 301",
        "young": "nothing_yet: status 503",
        "state": "refused: status 404 Not Found; is pages_state on there?",
        "empty": "nothing_yet: nothing was learned in this state",
    }.items():
        assert f"/{name}: {words}" in text


def test_a_state_is_asked_for_with_the_token_and_written_when_it_is_another_one(states, tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\nanother\n")
    served = {"state": states["e0"]}
    with state_server(served) as server:
        source, token = f"http://127.0.0.1:{server.port}", partial(read_token, tmp_path / "token")
        puller = Puller([source], tmp_path / "fleet", CONFIG, token=token)
        puller.start()
        first = puller.pull()
        second = puller.pull()
        path, asked = server.asked[0]
        assert (path, asked["Authorization"]) == ("/state", "Bearer 0123456789abcdef")
        assert second.snapshot is first.snapshot, "nothing new: the generation stays"
        (tmp_path / "fleet" / "snapshot.json").unlink()
        second = puller.pull()
        assert (tmp_path / "fleet" / "snapshot.json").exists(), "files that somebody removed are written again"
        served["state"] = states["later"]
        third = puller.pull()
        (tmp_path / "token").write_bytes(b"\xff")
        (unasked,) = puller.pull().sources
        puller.stop()
    assert (unasked.outcome, unasked.detail) == ("unreachable", f"{tmp_path / 'token'} is no token: it is not text")
    assert third.snapshot.generation == second.snapshot.generation + 1
    assert third.sources[0].rows == 900


def test_a_name_stands_for_every_address_behind_it():
    behind = {"pods.llm.svc": ["10.0.0.1", "10.0.0.2", "fd00::1"]}
    sources = ["dns+http://pods.llm.svc:9464", "http://10.0.0.1:9464"]
    places = find_targets(sources, lambda host, _port: behind[host])
    names = ["10.0.0.1", "10.0.0.2", "[fd00::1]"]
    assert [place.name for place in places] == [f"http://{name}:9464/state" for name in names]
    assert places[0].page.url == "http://pods.llm.svc:9464/state"


@pytest.mark.parametrize(("source", "taken"), [("", "2 sources: 2 merged"), ("c1", "1 source: 1 merged")])
def test_states_below_a_place_are_found(source, taken, states, tmp_path):
    for name, state in (("c1/states", "e0"), ("small/states", "e1")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.bin").write_bytes(states[state])
    assert pulled([tmp_path / source], tmp_path / "fleet")[1][0] == taken


def fleet_of(gains, directory):
    """What is published of engines of these speeds, and the last thing that was noted."""
    for n, gain in enumerate(gains):
        (directory / f"{n}.bin").write_bytes(state_of(f"engine-{n}", n, gain=gain, rows=400))
    _, _, noted = pulled([directory], directory / "fleet")
    (config,) = Snapshot.from_json((directory / "fleet" / "snapshot.json").read_bytes()).configs
    return config, noted[-1]


def test_whoever_asks_a_merged_snapshot_hears_of_the_engine_that_is_slower(tmp_path, capsys):
    _, noted = fleet_of((1.0, 1.0, 1.0, 1.43), tmp_path)
    snapshot = tracefit.load(tmp_path / "fleet" / "snapshot.json")
    doubt, problem = snapshot.config().verdict.problems(snapshot.created_unix_nano)
    assert doubt.text == "not usable: its engines disagree: engine engine-3 takes 1.4 × as long as the others"
    assert problem.text.startswith("engine 'engine-3' takes 1.4")
    assert problem.text.endswith("times as long as the others: every term alike")
    assert noted.endswith(problem.text)
    assert main(["show", str(tmp_path / "fleet" / "snapshot.json")]) == 1, "nothing of it is usable"
    assert problem.text in capsys.readouterr().out
