"""`/predict` and `/plan`: the command's own documents over HTTP, and a line that names what is wrong."""

import json
import re
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector.cli import main
from exporters.questions import PLAN, PREDICT
from online import Snapshot
from tests.support.pages import answer_to
from tests.tracefit.example_snapshot import encoded, step_time_of, tree

WHOLE = Snapshot.from_json(encoded())


def ask(target, snapshot=WHOLE):
    return answer_to(target, snapshot)


def bent(edit):
    changed = tree()
    edit(changed)
    return Snapshot.from_json(encoded(changed))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("/predict?requests=20&prefill=512&context=3e4", "--requests 20 --prefill 512 --context 3e4"),
        ("/predict?prompt=2000&output=300", "--prompt 2000 --output 300"),
        (
            "/predict?prompt=2000&output=300&concurrency=12.5&prefix_hit=0.4",
            "--prompt 2000 --output 300 --concurrency 12.5 --prefix-hit 0.4",
        ),
        ("/plan?prompt=2000&output=300&itl=30ms&config=0f3c", "--prompt 2000 --output 300 --itl 30 --which 0f3c"),
        (
            "/plan?prompt=20&output=30&itl=30ms&ttft=1s&rate=12&safe=on&kv_tokens=2000&max_num_seqs=64",
            "--prompt 20 --output 30 --itl 30 --ttft 1s --rate 12 --safe --kv-tokens 2000 --max-num-seqs 64",
        ),
    ],
)
def test_http_and_the_command_line_say_the_same_to_the_byte(target, words, tmp_path, capsys):
    (tmp_path / "snapshot.json").write_bytes(encoded())
    response = ask(target)
    assert (response.status, response.content_type) == (200, "application/json")
    assert main([target[1:].partition("?")[0], str(tmp_path / "snapshot.json"), *words.split(), "--json"]) == 0
    assert response.body.decode() == capsys.readouterr().out


BAD = """
/predict prompt
/predict?prefill=3 requests
/predict?prompt=3 output
/predict?prompt=3&output=3&requests=2 prompt
/predict?requests=-1 requests
/predict?requests=nan requests
/predict?requests=twenty requests
/predict?requests=20&prefix_hit=0.4 prefix_hit
/predict?requests=1&prefill=1000000000000 prefill
/predict?prompt=10&output=10&prefix_hit=1.1 prefix_hit
/predict?promt=10&output=10 promt
/predict?requests=1&itl=30ms itl
/plan prompt
/plan?prompt=10&output=10 itl: without a target anything fits
/plan?prompt=10&output= output
/plan?prompt=10&output=10&itl=soon itl
/plan?prompt=10&output=10&itl=0 itl
/plan?prompt=10&output=10&ttft=999999999999s ttft
/plan?prompt=10&output=10&rate=0 rate
/plan?prompt=10&output=10&safe=maybe safe
/plan?prompt=10&output=10&itl=30ms&safe safe: or a plan that is not the safe one
/plan?prompt=10&output=10&itl= itl: a script's variable that nobody set: or a plan without the target
/plan?prompt=10&output=10&itl=30&max_num_seqs=0 max_num_seqs
/plan?prompt=10&output=10&max_num_seqs=1.5 max_num_seqs
/plan?prompt=10&output=10&itl=30&max_num_batched_tokens=1 max_num_batched_tokens
/plan?prompt=10&output=10&itl=30&kv_tokens=3 prompt
/plan?prompt=10&output=10&<script>=1 <script>
"""
"""What is asked, and the parameter that is named."""
TOO_LONG = f"/plan?prompt=10&output=10&kv_tokens={'9' * 5000} kv_tokens"


@pytest.mark.parametrize("line", [*BAD.strip().splitlines(), TOO_LONG], ids=lambda line: line[:60])
def test_a_bad_parameter_is_a_400_that_names_it_on_one_short_line(line):
    target, parameter, *_ = line.replace(":", "").split()
    response = ask(target)
    assert response.status == 400
    assert response.content_type.startswith("text/plain")
    assert re.fullmatch(rf"{parameter}: .{{1,280}}\n", response.body.decode())


NAMES = [each.name for each in (*PREDICT, *PLAN)]
VALUES = st.one_of(
    st.text(max_size=12),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["30ms", "1e9", "1", "0.5", "²"]),
)


@given(path=st.sampled_from(["/predict", "/plan"]), query=st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES))
def test_whatever_is_asked_it_answers_or_says_why_not(path, query):
    response = ask(f"{path}?{urlencode(query, errors='replace')}")
    assert response.status in {200, 400, 404}
    if response.status == 200:
        json.loads(response.body, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("snapshot", "status", "said"), [(None, 503, b"nothing learned yet"), (WHOLE, 404, b"0f3c5a9b77e1")]
)
def test_before_the_first_snapshot_and_of_an_unknown_configuration_it_says_so(snapshot, status, said):
    response = ask("/plan?prompt=10&output=10&itl=30&config=zzz", snapshot)
    assert (response.status, said in response.body) == (status, True)


@pytest.mark.parametrize(("coefficient", "status"), [(9e29, 200), (9e299, 422)])
@pytest.mark.parametrize(
    "target", ["/predict?requests=1e6&context=1e9", "/predict?prompt=900&output=90", "/plan?prompt=9&output=9&itl=9s"]
)
def test_the_largest_coefficients_that_are_read_lead_to_finite_times(target, coefficient, status):
    def absurd(changed):
        for feature in step_time_of(changed)["models"]["portable"]["features"]:
            feature["coefficient"] = feature["stderr"] = coefficient
        step_time_of(changed)["shape_factors"] = {}

    response = ask(target, bent(absurd))
    assert response.status == status
    assert not re.search(b"NaN|Infinity", response.body)


@pytest.mark.parametrize("target", ["/predict?prompt=200&output=100", "/plan?prompt=200&output=100&itl=30ms"])
def test_an_answer_says_why_not_to_use_it_and_what_is_hidden_and_a_prefix_hit_is_refused_there(target):
    def young_of_spans(changed):
        changed["configs"][0].update(telemetry="requests", prefix_hits_hidden=True)
        step_time_of(changed)["models"]["portable"]["rows"] = 40

    hidden = bent(young_of_spans)
    answer = json.loads(ask(target, hidden).body)
    assert any("one span per request" in clause for clause in answer["hidden"])
    assert any("prefix-cache hits are hidden" in clause for clause in answer["hidden"])
    assert answer["reasons"] == ["learned from 40 rows, fewer than 256"]
    refused = ask(f"{target}&prefix_hit=0.5", hidden)
    assert (refused.status, refused.body.startswith(b"prefix_hit: the telemetry")) == (400, True)


def test_an_answer_about_requests_says_which_times_are_not_in_it():
    bare = bent(lambda changed: changed["configs"][0].update(targets={"step_time": step_time_of(changed)}))
    assert "api_queueing" not in json.loads(ask("/predict?prompt=10&output=10").body)["missing"]
    for question in ("/predict?prompt=10&output=10", "/plan?prompt=10&output=10&itl=50"):
        told = json.loads(ask(question, bare).body)
        assert told["missing"] == ["api_queueing", "post_decode"]
        assert {"usable", "extrapolated"} <= told.get("at", told).keys()


def test_a_step_of_decodes_without_a_context_has_the_usual_one():
    told = json.loads(ask("/predict?requests=8").body)
    context = told["query"]["decode_context_tokens"]
    assert context > 0
    assert told["us"] == json.loads(ask(f"/predict?requests=8&context={context}").body)["us"]
    assert json.loads(ask("/predict?requests=1&prefill=512").body)["query"]["decode_context_tokens"] == 0
    assert json.loads(ask("/predict?requests=8&context=0").body)["query"]["decode_context_tokens"] == 0
