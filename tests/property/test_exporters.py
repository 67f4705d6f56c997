"""Whatever a snapshot contains, what leaves is well formed."""

import contextlib
import functools
import json
import math
import re
import typing

import msgspec
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.blis import BlisError, export
from exporters.metrics_page import render_metrics, snapshot_families
from exporters.pages import Request
from exporters.status_page import StatusPage
from exporters.what_if import Advisory
from online.errors import RATIO_BOUNDS
from online.snapshot import (
    SCHEMA,
    ConfigSnapshot,
    FeatureSnapshot,
    ModelSnapshot,
    Reason,
    ResidualSnapshot,
    Snapshot,
    TargetSnapshot,
)
from tests.support.pages import routes_of

SETS = {
    "step_time": ("intercept", "prefill_tokens", "decode_context_tokens", "requests"),
    "api_queueing": ("intercept", "prompt_tokens"),
    "post_decode": ("intercept", "output_tokens"),
}
TARGETS = ("step_time", "api_queueing", "post_decode", "first_response")
names = st.one_of(st.sampled_from(["portable", "intercept", "requests", "us", "us/token", ""]), st.text(max_size=20))
numbers = st.floats(allow_nan=True, allow_infinity=True)
LEAVES = {
    str: names,
    bool: st.booleans(),
    float: numbers,
    int: st.integers(0, 2**53),
    type(None): st.none(),
    Reason: st.sampled_from(Reason),
}
N_CLASSES = len(RATIO_BOUNDS) + 1


@functools.cache
def of(kind):
    """Anything of a type that a snapshot is made of."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if origin is list:
        return st.lists(of(*parts), max_size=2)
    if origin is dict:
        return st.dictionaries(*map(of, parts), max_size=2)
    if origin is not None:
        return st.tuples(*map(of, parts)) if origin is tuple else st.one_of(*map(of, parts))
    hints = typing.get_type_hints(kind).items()
    return st.builds(kind, **{name: BOUND[name] if name in BOUND else of(hint) for name, hint in hints})


FEWER = settings.default.max_examples // 2
"""A snapshot takes long to draw."""
BOUND = {"schema": st.just(SCHEMA)}
BOUND["residuals"] = st.none() | st.builds(
    ResidualSnapshot,
    ratio_bounds=st.just(list(RATIO_BOUNDS)),
    rows=st.lists(st.integers(0, 2**50), min_size=N_CLASSES, max_size=N_CLASSES),
    ratio_sum=numbers,
)
BOUND["targets"] = st.dictionaries(st.sampled_from(TARGETS) | names, of(TargetSnapshot), max_size=3)
configs, snapshots = of(ConfigSnapshot), of(Snapshot)


@st.composite
def exportable(draw):
    """A configuration with every coefficient that BLIS asks for, some of them odd."""
    odd = st.floats(0, 1e9) | st.sampled_from([0.0, 5e-324, 1e308, math.nan, math.inf, -1.0])
    made = {}
    for target, columns in SETS.items():
        chosen = [FeatureSnapshot(name=c, unit="us", coefficient=draw(odd), status=draw(names)) for c in columns]
        model = ModelSnapshot(features=chosen, rows=1, effective_rows=1.0)
        made[target] = TargetSnapshot(
            vector="x", unit="us", champion="portable", models={"portable": model}, mean_us=draw(st.none() | odd)
        )
    return draw(configs.map(lambda config: msgspec.structs.replace(config, config={}, targets=made)))


LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}


@settings(max_examples=FEWER)
@given(snapshots)
def test_any_snapshot_gives_pages_that_parse_and_values_that_are_finite(snapshot):
    page = render_metrics(snapshot_families(snapshot, Advisory())).decode()
    samples = [sample for family in parse_text(page) for sample in family.samples]
    assert all(math.isfinite(sample.value) for sample in samples)
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(keys) == len(set(keys))


@settings(max_examples=FEWER)
@given(snapshots)
def test_any_snapshot_gives_a_status_page_and_documents(snapshot):
    page = StatusPage(lambda: snapshot, CollectorRegistry(), ready=lambda: (True, {}), unix_nano=lambda: 0)
    text = page.answer(Request("/", (), {}, {})).body.decode()
    assert text.count("<script>") == text.count("</script>") == 1
    drawn = re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy|width|height|points|d|viewBox)="([^"]*)"', text)
    assert not [value for value in drawn if "nan" in value or "inf" in value]
    documents = routes_of(lambda: snapshot)
    assert json.loads(documents["/snapshot"](Request("/snapshot", (), {}, {})).body)["generation"] >= 0
    for config in snapshot.configs:
        request = Request("/snapshot/x/blis.yaml", (config.config_id,), {}, {})
        assert documents["/snapshot/*/blis.yaml"](request).status in {200, 422}


@settings(max_examples=FEWER)
@given(snapshots, exportable())
def test_any_configuration_is_exported_whole_or_refused(snapshot, odd_one):
    for config in (*snapshot.configs, odd_one):
        alone = msgspec.structs.replace(snapshot, configs=[config])
        with contextlib.suppress(BlisError):
            values = yaml.safe_load(export(alone, alone.configs[0], model_config=LLAMA, hardware="H100")[0])[
                "trained_physics_coefficients"
            ]
            assert [len(values["alpha_coeffs"]), len(values["beta_coeffs"])] == [3, 11]
            assert all(math.isfinite(v) and v >= 0 for numbers in values.values() for v in numbers)
