"""`predict`, `plan`, `show` and `diff` on a loaded snapshot: what is printed, in text and JSON, and the exit code."""

import json

import pytest

import tracefit
from collector.commands.ask import ask, diff, show
from exporters.questions import read_plan, read_prediction
from tests.support.command_lines import spoken
from tests.tracefit.example_snapshot import encoded, tree

SNAPSHOT = tracefit.load(encoded())


def step(prefill, requests, context):
    return read_prediction({"prefill": prefill, "requests": requests, "context": context})


def load(prompt, output, concurrency, prefix_hit=None):
    given = {"prompt": prompt, "output": output, "concurrency": concurrency, "prefix_hit": prefix_hit}
    return read_prediction(given)


def sizing(**given):
    return read_plan({"prompt": 100, "output": 10, **given})


class Printed:
    """What a command said, and what it noted beside."""

    def __init__(self, command, *args, **options):
        self.code, self.said, self.noted = spoken(command, *args, **options)
        self.text = "\n".join(self.said)

    @property
    def tree(self):
        return json.loads(self.text)


def asked(command, *args, in_json=False, **options):
    return Printed(command, *args, which="", in_json=in_json, **options)


def changed(edit):
    bent = tree()
    edit(bent["configs"][0])
    return tracefit.load(encoded(bent))


def test_predict_says_what_a_step_takes_and_what_it_is_made_of():
    printed = asked(ask, SNAPSHOT, step(512, 20, 30_000))
    assert (printed.code, printed.noted) == (0, [])
    assert "35.7 ms   (8 of 10: 33.9 ms to 38.2 ms)" in printed.text
    assert "intercept 23%, prefill_tokens 62%" in printed.text
    assert "times 1.031 for this shape" in printed.text


def test_predict_in_json_has_the_keys_of_the_client():
    printed = asked(ask, SNAPSHOT, step(512, 20, 30_000), in_json=True)
    answer = SNAPSHOT.config().step_time(prefill_tokens=512, requests=20, decode_context_tokens=30_000)
    assert printed.tree["us"] == answer.us
    assert printed.tree["asked"] == {"prefill_tokens": 512, "requests": 20, "decode_context_tokens": 30_000}


def test_predict_says_what_requests_see():
    printed = asked(ask, SNAPSHOT, load(2000, 300, 20))
    assert printed.code == 0
    for word in ("TTFT      130 ms", "ITL       20.6 ms", "E2E       6.28 s", "3.19 requests/s"):
        assert word in printed.text
    assert asked(ask, SNAPSHOT, load(2000, 300, 20), in_json=True).tree["itl"]["us"] == pytest.approx(20_553, abs=1)


def test_what_lies_outside_is_noted_with_what_was_seen():
    printed = asked(ask, SNAPSHOT, step(0, 64, 57_600))
    assert printed.code == 0
    assert printed.noted == ["outside of what was learned from: requests (1 to 60 seen), shape"]


def test_a_token_budget_that_nobody_told_is_noted_where_prompts_need_several_steps():
    untold = changed(lambda config: config["config"].pop("max_num_batched_tokens"))
    assert "max_num_batched_tokens (nobody told it)" in asked(ask, untold, load(5000, 100, 4)).noted[0]


def test_plan_says_how_many_fit_and_why_not_more():
    printed = asked(ask, SNAPSHOT, sizing(prompt=2000, output=300, itl=30, ttft=1000, rate=12))
    assert printed.code == 0
    for word in ("fits      34 requests", "one more request breaks the ITL target", "4 engines are needed", "<-"):
        assert word in printed.text
    assert "slots" not in printed.text


def test_a_plan_without_a_limit_ends_at_the_largest_batch_seen_and_says_which_to_give():
    def unlimited(config):
        config["config"] = {"model": "llama"}

    printed = asked(ask, changed(unlimited), sizing(itl=300_000))
    assert "fits      60 requests" in printed.text
    assert "give max_num_seqs or kv_tokens" in printed.text
    assert printed.noted == []
    assert "fits      500 requests" in asked(ask, changed(unlimited), sizing(itl=300_000, max_num_seqs=500)).text


def test_show_has_every_coefficient_with_its_error():
    printed = asked(show, SNAPSHOT)
    assert printed.code == 0
    for word in ("verdict   usable", "7,900 ± 78", "identified", "max_num_seqs 128", "decode:1 x0.97", "api_queueing"):
        assert word in printed.text
    coefficients = asked(show, SNAPSHOT, in_json=True).tree["configs"][0]["targets"]["step_time"]["coefficients"]
    assert [each["value"] for each in coefficients] == [7900, 42, 0.11, 95]


def test_show_says_what_a_time_grows_by_with_the_requests_in_flight():
    grown = {"requests": 68.9, "us_per_request": 54.6}
    snapshot = changed(lambda config: config["targets"]["api_queueing"].update(in_flight=grown))
    assert "54.6 µs more with each request in flight beyond 69" in asked(show, snapshot).text
    targets = asked(show, snapshot, in_json=True).tree["configs"][0]["targets"]
    assert (targets["api_queueing"]["in_flight"], targets["step_time"]["in_flight"]) == (grown, None)


def test_show_says_that_shape_factors_are_left_out():
    def left_out(config):
        step = config["targets"]["step_time"]
        step["shape_factors"] = {cell: {"factor": 1.0, "rows": 50.0} for cell in step["shape_factors"]}
        step["shape_factors_applied"] = False

    text = asked(show, changed(left_out)).text
    assert "factors not applied" in text
    assert "x1.00" not in text

    def alike(config):
        left_out(config)
        del config["targets"]["step_time"]["shape_factors_applied"]

    assert "not applied" not in asked(show, changed(alike)).text


def test_diff_says_what_moved_and_what_it_costs():
    def slower(config):
        config["targets"]["step_time"]["models"]["portable"]["features"][0]["coefficient"] = 8_400.0

    printed = Printed(diff, SNAPSHOT, changed(slower), in_json=False)
    assert printed.code == 0
    assert "+8.8 standard errors  MOVED" in printed.text
    assert "(+3.7%)" in printed.text
    moves = Printed(diff, SNAPSHOT, changed(slower), in_json=True).tree["configs"][0]["moves"]
    assert [each["feature"] for each in moves if each["moved"]] == ["intercept"]


def test_diff_of_strangers_fails():
    other = tree()
    other["configs"] = []
    printed = Printed(diff, SNAPSHOT, tracefit.load(encoded(other)), in_json=False)
    assert printed.code == 1
    assert "no configuration in common" in printed.noted[0]


def test_diff_with_what_has_learned_nothing_says_so_and_fails():
    def forgets(config):
        config["targets"] = {}

    printed = Printed(diff, SNAPSHOT, changed(forgets), in_json=False)
    assert printed.code == 1
    assert "nothing to compare" in printed.text
    assert "no coefficient in common" in printed.noted[0]


ASKED = [step(0, 1, 0), load(100, 10, 1), sizing(itl=30)]


@pytest.mark.parametrize("question", ASKED)
def test_without_coefficients_it_fails_and_says_which_and_why(question):
    printed = asked(ask, changed(lambda config: config["targets"].pop("step_time")), question)
    assert printed.code == 1
    assert printed.noted == ["error: configuration 0f3c5a9b77e1 has learned nothing about step_time yet"]


@pytest.mark.parametrize("question", ASKED)
def test_with_coefficients_that_should_not_be_used_it_answers_and_fails(question):
    def young(config):
        config["targets"]["step_time"]["models"]["portable"]["rows"] = 40

    printed = asked(ask, changed(young), question)
    assert printed.said
    assert printed.code == 1
    assert "40 rows" in printed.noted[0]
