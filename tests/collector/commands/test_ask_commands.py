"""`predict`, `plan`, `show` and `diff` of a snapshot: what is printed, in text and JSON, and the exit code."""

import json

import pytest

from collector.cli import main
from tests.tracefit.example_snapshot import encoded, step_time_of, tree


@pytest.fixture
def asked(tmp_path, capsys):
    """Ask a snapshot that was bent by ``edit``: the exit code, and what stands on both outputs."""

    def ask(command, options="", edit=None):
        bent = tree()
        if edit is not None:
            edit(bent)
        (tmp_path / "before.json").write_bytes(encoded())
        (tmp_path / "snapshot.json").write_bytes(encoded(bent))
        before = [str(tmp_path / "before.json")] if command == "diff" else []
        code = main([command, *before, str(tmp_path / "snapshot.json"), *options.split()])
        return (code, *capsys.readouterr())

    return ask


def portable(bent):
    return step_time_of(bent)["models"]["portable"]


def unknown_columns(bent):
    bent["configs"][0]["config"].pop("max_num_batched_tokens")


def unlimited(bent):
    bent["configs"][0]["config"] = {"model": "llama"}


def slower(bent):
    portable(bent)["features"][0]["coefficient"] = 8_400.0


def all_slower(bent):
    features = portable(bent)["features"]
    for feature, stderr in zip(features, (40.0, 0.4, 0.004, 400.0), strict=True):
        feature |= {"coefficient": 1.2 * feature["coefficient"], "stderr": stderr}


STEP, LOAD = "--prefill 512 --requests 20 --context 30000", "--prompt 2000 --output 300"


PLANNED = ["fits      34 requests", "breaks the ITL target", "4 engines are needed", "<-"]


@pytest.mark.parametrize(
    ("command", "options", "edit", "words"),
    [
        ("predict", STEP, None, ["35.7 ms   (8 of 10: 33.9 ms to 38.2 ms)"]),
        ("predict", f"{LOAD} --concurrency 20", None, ["TTFT      129 ms", "ITL       20.5 ms", "E2E       6.26 s"]),
        ("plan", f"{LOAD} --itl 30ms --ttft 1s --rate 12", None, PLANNED),
        ("plan", "--prompt 99 --output 9 --itl 300s", unlimited, ["fits      60 ", "give max_num_seqs or kv_tokens"]),
        ("plan", "--prompt 99 --output 9 --itl 300s --max-num-seqs 500", unlimited, ["fits      500 requests"]),
        ("show", "", None, ["verdict   usable", "7.90 ms ± 1.0 %", "identified", "max_num_seqs 128"]),
        ("diff", "", slower, ["+8.8 standard errors  MOVED", "(+3.7%)"]),
        ("diff", "", all_slower, ["what moved: every term alike"]),
    ],
)
def test_what_is_asked_is_answered_in_the_words_and_units_of_people(asked, command, options, edit, words):
    code, said, _ = asked(command, options, edit)
    assert code == 0
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("options", "edit", "noted"),
    [
        (
            "--prefill 0 --requests 64 --context 57600",
            None,
            "outside of what was learned from: requests (1 to 60 seen)",
        ),
        ("--prompt 5000 --output 100 --concurrency 4", unknown_columns, "max_num_batched_tokens (unknown)"),
    ],
)
def test_what_lies_outside_is_noted_with_what_was_seen(asked, options, edit, noted):
    code, _, said = asked("predict", options, edit)
    assert code == 0
    assert noted in said


def test_coefficients_and_moves_are_told_as_json(asked):
    targets = json.loads(asked("show", "--json")[1])["configs"][0]["targets"]
    assert [each["value"] for each in targets["step_time"]["coefficients"]] == [7900, 42, 0.11, 95]
    moves = json.loads(asked("diff", "--json", slower)[1])["configs"][0]["moves"]
    assert [each["feature"] for each in moves if each["moved"]] == ["intercept"]


def forgets(bent):
    bent["configs"][0]["targets"] = {}


def young(bent):
    portable(bent)["rows"] = 40


ASKED = [("predict", "--requests 1 --context 0"), ("predict", "--prompt 9 --output 9"), ("plan", f"{LOAD} --itl 30ms")]


@pytest.mark.parametrize(
    ("command", "options", "edit", "answers", "noted"),
    [
        ("diff", "", lambda bent: bent["configs"].clear(), False, "no configuration in common"),
        ("diff", "", forgets, True, "no coefficient in common"),
        *((*each, forgets, False, "error: configuration 0f3c5a9b77e1 has learned nothing") for each in ASKED),
        *((*each, young, True, "not usable yet: learned from 40 rows, fewer than 256") for each in ASKED),
    ],
)
def test_what_cannot_be_answered_or_should_not_be_used_fails_and_says_why(
    asked, command, options, edit, answers, noted
):
    code, said, reason = asked(command, options, edit)
    assert code == 1
    assert noted in reason
    assert bool("".join(line for line in said.splitlines() if not line.startswith("only"))) == answers
