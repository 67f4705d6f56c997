"""The status page as a document: complete without scripts, safe, and readable by all."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge

from collector.telemetry import PluginLoss
from exporters.pages.routing import Request
from exporters.status_page.advice import QUALITY, STATUS, advice_for
from exporters.status_page.charts import meter, nice_limit, whisker
from exporters.status_page.history import FIRST_SPACING_NS, MAX_POINTS, History
from exporters.status_page.remarks_section import PLUGIN_REMEDIES, Remarks, remarks_section
from exporters.status_page.status_page import MAX_DETAILS, MAX_OVERVIEW, StatusPage
from exporters.status_page.text import age, coefficient, duration, percent, significant
from online.rows import Quality
from online.snapshot import DriftSnapshot, ErrorSnapshot
from tests.support import exporter_cases as cases

VOID = {"input", "meta", "line", "circle", "rect", "path", "polygon", "polyline"}


class Document(HTMLParser):
    """A strict reading: every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.elements = []
        self.words = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"style", "script"}:
            self.words.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def registry():
    own = CollectorRegistry()
    received = Counter("tracefit_receiver_received_spans", "Spans received.", ["transport"], registry=own)
    received.labels("grpc").inc(1200)
    refused = Counter("tracefit_receiver_refused_spans", "Spans refused.", ["transport", "reason"], registry=own)
    refused.labels("grpc", "queue_full").inc(7)
    refused.labels("grpc", "shutting_down")
    Counter("tracefit_receiver_failed_spans", "Spans lost.", registry=own)
    Gauge("tracefit_queue_size_bytes", "Waiting.", registry=own).set(600)
    Gauge("tracefit_queue_capacity_bytes", "Most.", registry=own).set(1000)
    return own


def page_for(source, own=None, ready=True):
    return StatusPage(
        source,
        registry() if own is None else own,
        ready=lambda: (ready, {}),
        unix_nano=lambda: cases.CREATED_UNIX_NANO + 4_000_000_000,
        version="0.1.0",
    )


def answer(snapshot, query=None, **kwargs):
    return page_for(lambda: snapshot, **kwargs).answer(Request("/", (), query or {}, {}))


def read(snapshot, query=None, **kwargs):
    return Document(answer(snapshot, query, **kwargs).body.decode())


def words(snapshot, query=None, **kwargs):
    return " ".join(" ".join(read(snapshot, query, **kwargs).words).split())


def test_a_person_finds_the_coefficients_with_their_uncertainty():
    text = words(cases.snapshot())
    for expected in ("meta-llama/Llama-2-7b-hf", "16.8 ms", "580 µs/token", "70.0 ns/token", "1.30 ms/request"):
        assert expected in text
    assert "263 µs" in text or "262 µs" in text  # 16.8 ms / 64
    assert "identified" in text
    assert "1.3 %" in text


def test_of_a_merged_state_the_engines_that_differ_stand_first_with_their_ratio():
    text = words(cases.snapshot())
    assert "Merged from 3 engines: 1 differ by more than their errors" in text
    assert "vllm-7 differs ×1.600 ± 0.008 400 vllm-0 ×0.969 ± 0.031 800 unknown – 3" in text
    assert "Merged from" not in words(cases.full_snapshot(1))


def test_every_status_and_quality_has_its_words():
    assert set(QUALITY) == {quality.label for quality in Quality} | {"merged"}
    for status, meaning in STATUS.items():
        target = msgspec.structs.replace(
            cases.target("step_time"), models={"portable": cases.model(cases.PORTABLE["step_time"], status=status)}
        )
        text = words(cases.snapshot(cases.config(targets={"step_time": target})))
        assert status.replace("_", " ") in text
        assert status == "identified" or meaning in text


def test_a_weak_coefficient_says_what_is_the_matter():
    def page(**diagnosis):
        portable = cases.model(cases.PORTABLE["step_time"], status="weak")
        features = [msgspec.structs.replace(feature, **diagnosis) for feature in portable.features]
        model = msgspec.structs.replace(portable, features=features)
        target = msgspec.structs.replace(cases.target("step_time"), models={"portable": model})
        return words(cases.snapshot(cases.config(targets={"step_time": target})))

    assert "moves together with the other features (VIF 37)" in page(vif=37.2)
    assert "still mostly a prior (21 % learned)" in page(vif=1.2, learned_share=0.21)
    assert STATUS["weak"] in page(vif=1.2, learned_share=0.9)


def test_operating_points_stand_in_the_order_of_their_size():
    strata = dict.fromkeys(("decode:16-31", "decode:2-3", "prefill:1", "decode:1", "odd"), (0.9, 1.0, 1.1))
    target = cases.target("step_time")
    target = msgspec.structs.replace(target, interval=msgspec.structs.replace(target.interval, strata=strata))
    text = answer(cases.snapshot(cases.config(targets={"step_time": target}))).body.decode()
    shown = re.findall(r'class="row-label"[^>]*>([^<]*)<', text)
    assert shown == ["all", "decode:1", "decode:2-3", "decode:16-31", "odd", "prefill:1"]


def test_a_poor_quality_of_telemetry_comes_with_what_to_switch_on():
    text = words(cases.snapshot(cases.config(telemetry="sampled")))
    assert "--step-tracing-sample-rate 1.0" in text
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT=20000" in text


def test_advice_is_never_empty_and_knows_what_is_missing():
    bare = msgspec.structs.replace(
        cases.config(targets={"step_time": cases.target("step_time")}, telemetry="?"), config={}
    )
    found = advice_for(bare)
    assert [advice.level for advice in found] == ["poor", "fair", "fair"]
    assert len(advice_for(cases.config())) == 1


@pytest.mark.parametrize("quality", ["steps+", "requests"])
def test_no_advice_has_a_flag_that_a_stock_vllm_does_not_know(quality):
    config = cases.config(targets={"step_time": cases.target("step_time")}, telemetry=quality)
    flags = [flag for advice in advice_for(config) for flag in advice.flags]
    assert not [flag for flag in flags if "journey" in flag or "step-tracing" in flag]


def test_steps_whose_context_cannot_be_known_are_said_with_the_way_out():
    config = cases.config(targets={"schedule_time": cases.target("schedule_time")}, telemetry="steps")
    facts = {name: fact for name, fact in config.config.items() if name != "block_size"}
    text = words(cases.snapshot(msgspec.structs.replace(config, config=facts)))
    assert "the decode context of a step cannot be known" in text
    assert "Set vllm.block_size, or trace journeys" in text


def test_before_the_first_snapshot_it_says_how_to_begin():
    text = words(None)
    assert "Waiting for telemetry" in text
    assert "--otlp-traces-endpoint http://127.0.0.1:4317" in text


def test_losses_are_shown_by_reason_and_what_did_not_happen_is_folded():
    text = words(cases.snapshot())
    assert "grpc, queue_full 7" in text
    assert "Some telemetry was left out" in text
    assert "shutting_down" not in text
    assert "1 kinds of loss that did not happen" in text
    assert "Nothing was lost or left out." in words(cases.snapshot(), own=CollectorRegistry())


def test_a_process_that_is_not_ready_says_so():
    assert "not ready" in words(cases.snapshot(), ready=False)


@pytest.mark.parametrize("snapshot", [None, cases.snapshot(), cases.full_snapshot(9)])
def test_it_is_a_document_that_assistive_technology_can_walk(snapshot):
    document = read(snapshot)
    ids = [attrs["id"] for _, attrs in document.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert [tag for tag, _ in document.elements if tag in {"main", "h1", "footer"}] == ["h1", "main", "footer"]
    assert document.all("html") == [{"lang": "en"}]
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in document.all("svg"))
    for tag, attrs in document.elements:
        named = attrs.get("aria-labelledby")
        assert named is None or named in ids, (tag, named)
        assert tag != "th" or attrs["scope"] in {"col", "row"}
        assert "style" not in attrs
        assert not any(name.startswith("on") for name in attrs)
    headings = [int(tag[1]) for tag, _ in document.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(headings))


def test_nothing_is_loaded_from_elsewhere():
    text = answer(cases.snapshot()).body.decode()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert "@import" not in text
    assert "url(" not in text


def test_the_policy_allows_exactly_the_style_and_the_script_that_are_there():
    response = answer(cases.snapshot())
    policy = dict(response.headers)["Content-Security-Policy"]
    text = response.body.decode()
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


NASTY = ["<script>alert(1)</script>", '"><img src=x>', "a\nb\0c", "🚀" * 50, "x" * 10_000, "&amp;"]


@pytest.mark.parametrize("nasty", NASTY)
def test_no_name_becomes_markup(nasty):
    config = msgspec.structs.replace(cases.config(name=nasty), config_id=nasty, telemetry=nasty)
    replicas = [msgspec.structs.replace(each, engine=nasty) for each in cases.REPLICAS]
    step = msgspec.structs.replace(cases.target("step_time"), champion=nasty, vector=nasty, replicas=replicas)
    targets = {nasty: step}
    hostile = cases.snapshot(msgspec.structs.replace(config, targets=targets), cases.config())
    document = read(hostile)
    assert len(document.all("script")) == 1
    assert document.all("img") == []
    assert html.unescape(nasty.splitlines()[0])[:100] in "".join(document.words)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_anywhere_keeps_the_document_whole(text):
    config = msgspec.structs.replace(cases.config(name=text), config={"model": text, text: text})
    assert len(read(cases.snapshot(config)).all("script")) == 1


def test_many_configurations_are_listed_and_opened_one_by_one():
    snapshot = cases.full_snapshot(MAX_OVERVIEW + 5)
    document = read(snapshot)
    assert sum("config" in (attrs.get("class") or "").split() for attrs in document.all("section")) == MAX_DETAILS
    assert "5 more in" in words(snapshot)
    wanted = snapshot.configs[50].config_id
    chosen = read(snapshot, {"config": wanted})
    assert [a["id"] for a in chosen.all("section") if a.get("class") == "config"] == [f"config-{wanted}"]
    assert read(snapshot, {"config": "no such"}).all("section")


def test_drift_is_marked_in_the_course_of_the_error():
    page = page_for(cases.snapshot)
    for generation in range(1, 30):
        now_unix_nano = cases.CREATED_UNIX_NANO + (generation - 29) * FIRST_SPACING_NS
        page.record(msgspec.structs.replace(cases.snapshot(generation=generation), created_unix_nano=now_unix_nano))
    text = page.answer(Request("/", (), {}, {})).body.decode()
    assert 'class="error-chart"' in text
    assert "×1.20" in text
    assert "1 changes of speed" in text


def snapshot_at(generation, unix_nano, median_ape=0.1, drift=None):
    target = cases.target("step_time")
    model = msgspec.structs.replace(
        target.models["portable"], error=ErrorSnapshot(mape=0.1, median_ape=median_ape, p90_ape=0.2)
    )
    target = msgspec.structs.replace(target, models={"portable": model}, drift=drift)
    config = cases.config(targets={"step_time": target})
    return msgspec.structs.replace(cases.snapshot(config, generation=generation), created_unix_nano=unix_nano)


@settings(deadline=None)
@given(st.integers(1, 4000))
def test_the_history_is_bounded_and_reaches_back_to_the_beginning(generations):
    history = History()
    for generation in range(1, generations + 1):
        history.record(snapshot_at(generation, generation * FIRST_SPACING_NS))
    points = history.course("0f3c52aa9b1e", "step_time").points
    assert 1 <= len(points) <= MAX_POINTS
    assert points[0].unix_nano == FIRST_SPACING_NS
    assert [p.unix_nano for p in points] == sorted({p.unix_nano for p in points})
    assert points[-1].unix_nano > generations * FIRST_SPACING_NS * 0.98 - 2 * FIRST_SPACING_NS


def test_a_drift_is_marked_once_and_a_configuration_that_left_is_forgotten():
    history = History()
    for generation, when in ((1, 5), (2, 5), (3, 9)):
        drift = DriftSnapshot(last_unix_nano=when, gain=1.1, count=1)
        history.record(snapshot_at(generation, generation * FIRST_SPACING_NS, drift=drift))
    assert [drift.unix_nano for drift in history.course("0f3c52aa9b1e", "step_time").drifts] == [5, 9]
    history.record(cases.snapshot(cases.config("bbbbbbbbbbbb"), generation=4))
    assert history.course("0f3c52aa9b1e", "step_time").points == ()


@pytest.mark.parametrize(
    ("value_us", "expected"),
    [(0, "0 µs"), (0.07, "70.0 ns"), (1, "1.00 µs"), (16_800, "16.8 ms"), (2_500_000, "2.50 s"), (-300, "-300 µs")],
)
def test_durations_are_read_in_the_unit_that_fits(value_us, expected):
    assert duration(value_us) == expected


def test_numbers_are_short_and_true():
    assert coefficient(1.9, "us/us") == "1.90 ×"
    assert coefficient(580, "us/token") == "580 µs/token"
    assert coefficient(3, "blocks") == "3.00 blocks"
    assert [percent(r) for r in (0, 0.013, 0.0996, 0.5, 12)] == ["0 %", "1.3 %", "10 %", "50 %", "1,200 %"]
    assert [age(s) for s in (-1, 3, 600, 9000, 200_000)] == ["0 s", "3 s", "10 min", "2 h", "2 d"]
    assert significant(float("nan")) == "unknown"
    assert nice_limit(0.21) == 0.3
    assert nice_limit(99) == 2.0


def test_charts_stay_inside_their_frame_whatever_the_numbers():
    for text in (whisker(1e9, -1e9, 0.1), whisker(None, None, 0.5), meter(5, 0, "x"), meter(-1, 10, "x")):
        coordinates = [float(n) for n in re.findall(r'(?:[xy][12]?|width)="(-?[\d.]+)"', text)]
        assert all(0 <= number <= 200 for number in coordinates)


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_by_wcag_aa_in_both_themes(theme):
    css = resources.files("exporters.status_page").joinpath("page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", blocks[theme]))
    text_on = {
        "card": ("ink", "soft", "accent", "live", "good", "fair", "poor"),
        "bg": ("ink", "soft", "accent", "good", "poor"),
        "code": ("ink",),
        "good-bg": ("ink", "soft", "good"),
        "fair-bg": ("ink", "soft", "fair"),
        "poor-bg": ("ink", "soft", "poor"),
    }
    ratios = {(fg, bg): contrast(colours[fg], colours[bg]) for bg, names in text_on.items() for fg in names}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


# --- what senders lose ------------------------------------------------------------------------------------------------


def test_what_a_plugin_loses_is_said_by_its_reason_with_its_own_remedy():
    assert {*PLUGIN_REMEDIES} == {*PluginLoss}
    text = remarks_section(Remarks(plugin_losses={"queue_full": 1200.0, "hook_error": 0.0}), None)
    assert "plugin.queue_full" in text
    assert "TRACEFITVLLM_QUEUE_ITEMS" in text
    assert "hook_error" not in text
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT" not in text
    assert remarks_section(Remarks(), cases.snapshot()) == ""


def test_foreign_scopes_are_named_and_cannot_become_markup():
    text = remarks_section(Remarks(foreign_scopes=("opentelemetry.<b>fastapi", "x")), None)
    assert "<code>opentelemetry.&lt;b&gt;fastapi</code>, <code>x</code>" in text


@pytest.mark.parametrize("telemetry", ["requests", "steps"])
def test_publishers_of_a_vllm_without_steps_are_told_why_they_belong_to_nobody(telemetry):
    configs = [msgspec.structs.replace(config, telemetry=telemetry) for config in cases.snapshot().configs]
    known = msgspec.structs.replace(cases.snapshot(), configs=configs)
    text = remarks_section(Remarks(unbound_publishers=2), known)
    assert ("2 KV publishers belong to no engine" in text) == (telemetry == "requests")
