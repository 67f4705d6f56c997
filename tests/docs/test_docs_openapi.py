"""docs/openapi.yaml: every route, every parameter of the questions, and answers that are what it says."""

import json
import re

import jsonschema
import pytest
import yaml

from exporters.questions import PLAN, PREDICT
from online import Snapshot
from tests.support.pages import answer_to, routes_of
from tests.support.paths import DOCS
from tests.tracefit.example_snapshot import encoded
from tracefit import Plan, Prediction, RequestEstimate

DOCUMENT = yaml.safe_load((DOCS / "openapi.yaml").read_text())
SCHEMA_OF = {
    "text": {"type": "string"},
    "number": {"type": "number", "minimum": 0},
    "whole": {"type": "integer", "minimum": 1},
    "time": {"type": "string"},
    "switch": {"type": "boolean"},
}


def test_it_has_every_route_and_no_other():
    patterns = {re.sub(r"\{\w+\}", "*", path) for path in DOCUMENT["paths"]}
    assert patterns == set(routes_of(lambda: None))


@pytest.mark.parametrize(("path", "parameters"), [("/predict", PREDICT), ("/plan", PLAN)])
def test_the_parameters_of_a_question_are_those_of_the_code(path, parameters):
    written = [
        {"name": each.name, "in": "query", "schema": SCHEMA_OF[each.kind], "description": each.meaning}
        | ({"required": True} if each.required else {})
        for each in parameters
    ]

    def by_name(parameter):
        return parameter["name"]

    assert sorted(DOCUMENT["paths"][path]["get"]["parameters"], key=by_name) == sorted(written, key=by_name)


ASKED = [
    ("/predict", "requests=20&prefill=512&context=30000"),
    ("/predict", "prompt=2000&output=300&concurrency=20&prefix_hit=0.4"),
    ("/plan", "prompt=2000&output=300&itl=30ms&ttft=1s&rate=12&safe=true"),
    ("/plan", "prompt=2000&output=300&ttft=9s&kv_tokens=20000&max_num_seqs=8&max_num_batched_tokens=512"),
]


@pytest.mark.parametrize(("path", "query"), ASKED)
def test_answers_are_what_it_says(path, query):
    response = answer_to(f"{path}?{query}", Snapshot.from_json(encoded()))
    assert response.status == 200, response.body
    assert response.content_type == "application/json"
    schema = DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(
        json.loads(response.body)
    )


@pytest.mark.parametrize(("schema", "answer"), [("AtLoad", RequestEstimate), ("Step", Prediction), ("Plan", Plan)])
def test_its_answers_have_every_key_of_the_client(schema, answer):
    written = DOCUMENT["components"]["schemas"][schema]
    part = written["allOf"][-1] if "allOf" in written else written
    assert set(part["properties"]) == set(part["required"]) == set(answer._fields)
