"""A snapshot as Prometheus families: what is shown, in which unit, and what is not."""

import math
import subprocess
from collections import Counter

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

import tracefit
from exporters.metrics_page import PAGE_FAMILIES, render_metrics, snapshot_families
from exporters.what_if import Advisory, WorkloadProfile
from exporters.wording import MAX_LABEL_CHARS, base_unit, printable
from online import Snapshot
from tests.conftest import find_tool
from tests.support import exporter_cases as cases
from tests.support.pages import answer_to
from tests.tracefit.example_snapshot import encoded

MIX = WorkloadProfile(400.0, 247.0, prefix_hit=0.25, concurrency=12.0, running=12.0, itl_us=41_000.0, ttft_us=310_000.0)


def advised(mix=MIX, itl_ms=(50.0, 100.0)):
    return Advisory(lambda _: mix, itl_ms)


def page_of(snapshot):
    return answer_to("/metrics", snapshot, advisory=advised(), unix_nano=cases.CREATED_UNIX_NANO).body


def series(snapshot, mix=MIX, itl_ms=(50.0, 100.0), **kwargs):
    """{(sample name, frozenset of labels): value} of everything a snapshot shows."""
    advisory = advised(mix, itl_ms)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in snapshot_families(snapshot, advisory, **kwargs)
        for sample in family.samples
    }


def named(shown, name):
    return {labels: value for (family, labels), value in shown.items() if family == name}


def test_the_page_is_the_golden_page():
    cases.assert_golden("golden_metrics.txt", page_of(cases.snapshot()))


def test_promtool_finds_nothing_to_say_about_the_page():
    promtool = find_tool("promtool")
    page = page_of(cases.snapshot())
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


NASTY = ['qu"ote', "back\\slash", "line\nfeed", "tab\tNUL\0", "emoji 🚀 Ω", "x" * 10_000, ""]


@pytest.mark.parametrize("name", NASTY)
def test_any_model_name_gives_a_page_that_parses(name):
    text = page_of(cases.snapshot(cases.config(name=name))).decode()
    info = next(f for f in parse_text(text) if f.name == "tracefit_config_info")
    shown = info.samples[0].labels["model_name"]
    assert len(shown) <= MAX_LABEL_CHARS
    assert shown == printable(name)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("us/token^2", ("seconds_per_token_squared", 1e6)),
        ("us/token*request", ("seconds_per_token_per_request", 1e6)),
        ("us/GB", ("seconds_per_gb", 1e6)),
        ("us", ("seconds", 1e6)),
        ("us/us", ("ratio", 1.0)),
    ],
)
def test_units_become_base_units(unit, expected):
    assert base_unit(unit) == expected


def test_the_page_never_shows_more_than_its_capacity_and_says_what_it_withheld():
    snapshot = cases.full_snapshot(4)
    everything = len(series(snapshot, max_series=10**6)) - len(PAGE_FAMILIES)
    for max_series in (1, 100, 1000):
        shown = series(snapshot, max_series=max_series)
        listed = len(shown) - len(PAGE_FAMILIES)
        assert listed <= max_series
        assert shown["tracefit_exposition_series", frozenset()] == listed
        assert shown["tracefit_exposition_series_withheld", frozenset()] == everything - listed


def test_a_configuration_is_shown_whole_or_not_at_all():
    snapshot = cases.full_snapshot(4)

    def by_config(max_series):
        return Counter(dict(labels)["config"] for _, labels in series(snapshot, max_series=max_series) if labels)

    every = by_config(10**6)
    shown = by_config(max(every.values()) * 5 // 2)
    assert shown == dict(list(every.items())[:2])


def advice(snapshot, **kwargs):
    """{name and labels but the configuration: value} of the advisory families."""
    names = ("tracefit_usable", "tracefit_predicted", "tracefit_observed", "tracefit_slo", "tracefit_load")
    return {
        (name, *sorted(value for key, value in labels if key != "config")): value
        for (name, labels), value in series(snapshot, **kwargs).items()
        if name.startswith(names)
    }


def test_advice_is_of_the_generation_that_is_asked_of():
    advisory, usable, young = advised(), cases.snapshot(), cases.snapshot(cases.config(targets={}))
    shown = [advisory.of(each, each.configs[0]).verdict.usable for each in (usable, young, usable)]
    assert shown == [True, False, True]


ASKED = {"prompt_tokens": 400, "output_tokens": 247, "prefix_hit": 0.25}


def test_advice_is_what_the_client_says_of_the_load():
    snapshot = cases.snapshot()
    config = tracefit.load(snapshot.to_json()).config()
    seen = config.request(concurrency=12, **ASKED)
    shown = advice(snapshot)
    assert shown["tracefit_usable",] == 1
    assert shown["tracefit_predicted_itl_seconds",] == pytest.approx(seen.itl.us / 1e6)
    assert shown["tracefit_predicted_ttft_seconds",] == pytest.approx(seen.ttft.us / 1e6)
    for itl_ms, label in ((50, "0.05"), (100, "0.1")):
        assert shown["tracefit_slo_concurrency", label] == config.plan(itl_ms=itl_ms, **ASKED).concurrency
        safe = config.plan(itl_ms=itl_ms, safe=True, **ASKED).concurrency
        assert shown["tracefit_slo_concurrency_safe", label] == safe
        assert safe <= shown["tracefit_slo_concurrency", label]
    api_us = cases.MEANS_US["api_queueing"] + cases.MEANS_US["first_response"]
    assert shown["tracefit_observed_ttft_seconds",] == (310_000.0 + api_us) / 1e6, "as the predicted one has them"
    assert shown["tracefit_load", "concurrency"] == 12


def test_who_waits_for_a_slot_makes_no_step_longer():
    config = tracefit.load(cases.snapshot().to_json()).config()
    full = config.request(concurrency=20, **ASKED)
    queued = config.assuming(max_num_seqs=20).request(concurrency=30, **ASKED)
    shown = advice(cases.snapshot(), mix=MIX._replace(concurrency=30.0, running=20.0))
    assert shown["tracefit_predicted_itl_seconds",] == pytest.approx(full.itl.us / 1e6)
    assert shown["tracefit_predicted_ttft_seconds",] == pytest.approx(queued.ttft.us / 1e6)
    assert queued.ttft.us > full.ttft.us


SEEN = Snapshot.from_json(encoded())
"""Batches of 1 to 60 requests were seen."""


def published(snapshot, *concurrencies):
    """What is published for the ITL that each of these has, by the snapshot with all coefficients."""
    config = tracefit.load(encoded()).config()
    itl_ms = [config.request(concurrency=each, **ASKED).itl.us / 1e3 + 1e-6 for each in concurrencies]
    shown = advice(snapshot, itl_ms=itl_ms)
    assert shown["tracefit_usable",] == 1
    return [shown.get(("tracefit_slo_concurrency", f"{each / 1e3:.6g}")) for each in itl_ms]


def test_no_concurrency_is_published_beyond_a_quarter_more_than_the_largest_batch_seen():
    assert published(SEEN, 34, 61, 75, 76, 120) == [34, 61, 75, None, None]
    busy = advice(SEEN, mix=MIX._replace(running=80.0))
    assert busy["tracefit_observed_itl_seconds",] > 0
    assert not [name for name in busy if "predicted" in name[0]]


def test_a_concurrency_whose_own_point_is_not_usable_is_not_published():
    """One more than was seen is within reach; whether it is published depends on what carries it."""
    config, step = SEEN.configs[0], SEEN.configs[0].targets["step_time"]
    weak = [msgspec.structs.replace(each, status="weak") for each in step.models["portable"].features]
    models = step.models | {"portable": msgspec.structs.replace(step.models["portable"], features=weak)}
    for changed in ({"models": models}, {"seen": None}):
        targets = config.targets | {"step_time": msgspec.structs.replace(step, **changed)}
        assert published(cases.snapshot(msgspec.structs.replace(config, targets=targets)), 61) == [None]


def test_without_a_load_there_is_a_verdict_and_no_advice():
    assert advice(cases.snapshot(), mix=None) == {("tracefit_usable",): 1.0}


def test_an_engine_that_falls_silent_has_no_verdict_although_no_generation_came_since():
    now, then = (
        render_metrics(snapshot_families(cases.snapshot(), advised(), cases.CREATED_UNIX_NANO + later))
        for later in (0, 11 * 60 * 10**9)
    )
    assert b"\ntracefit_usable{" in now
    assert b"\ntracefit_usable{" not in then
    assert b"\ntracefit_coefficient{" in then


def test_coefficients_that_should_not_be_used_give_a_0_and_no_advice():
    young = cases.config(targets={"step_time": cases.target("step_time")})
    portable = msgspec.structs.replace(young.targets["step_time"].models["portable"], rows=40)
    step = msgspec.structs.replace(young.targets["step_time"], models={"portable": portable})
    for targets in ({"step_time": step}, {}):
        shown = advice(cases.snapshot(msgspec.structs.replace(young, targets=targets)))
        assert shown["tracefit_usable",] == 0
        assert not [name for name in shown if "predicted" in name[0] or "slo" in name[0]]


@pytest.mark.parametrize(
    "mix",
    [
        MIX._replace(prompt_tokens=5e9),
        MIX._replace(concurrency=math.nan),
        MIX._replace(prompt_tokens=math.nan, itl_us=math.inf),
        MIX._replace(output_tokens=0.0),
        MIX._replace(itl_us=None, ttft_us=None),
    ],
)
def test_a_load_that_cannot_be_leaves_the_page_whole(mix):
    shown = series(cases.snapshot(), mix=mix)
    assert all(math.isfinite(value) for value in shown.values())
    assert len(named(shown, "tracefit_coefficient")) > 10
