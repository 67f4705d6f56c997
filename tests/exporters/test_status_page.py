"""The status page as a document: complete without scripts, safe, and readable by all."""

from __future__ import annotations

import base64
import copy
import hashlib
import html
import re
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge

from collector.telemetry import PluginLoss
from exporters.charts import CHART_STYLE
from exporters.labels import REASONS
from exporters.pages.routing import Request
from exporters.status_page.advice import QUALITY, STATUS, advice_for
from exporters.status_page.overview import MANY, MAX_DETAILS, MAX_OVERVIEW
from exporters.status_page.remarks_section import PLUGIN_REMEDIES, Remarks, remarks_section
from exporters.status_page.status_page import StatusPage
from online import InFlightSnapshot, Reason
from online.rows import Quality
from online.snapshot import DriftSnapshot
from online.target.course import Change, ChangeKind
from tests.support import exporter_cases as cases

VOID = {"input", "wbr", "meta", "line", "circle", "rect", "path", "polygon", "polyline"}


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


def page_for(source, own=None, ready=True, history_of=lambda _: None):
    return StatusPage(
        source,
        registry() if own is None else own,
        ready=lambda: (ready, {}),
        unix_nano=lambda: cases.CREATED_UNIX_NANO + 4_000_000_000,
        history_of=history_of,
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


def test_what_a_time_grows_by_with_the_requests_in_flight_stands_beside_its_mean():
    grown = InFlightSnapshot(requests=68.9, us_per_request=54.6, stderr_us=7.0)
    targets = {
        "step_time": cases.target("step_time"),
        "api_queueing": msgspec.structs.replace(cases.target("api_queueing"), in_flight=grown),
    }
    assert words(cases.snapshot(cases.config(targets=targets))).count("54.6 µs more with each request in flight") == 1


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

    for reason in Reason:
        assert REASONS[reason] in page(reason=reason)
    assert STATUS["weak"] in page(reason=None)


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


@pytest.mark.parametrize("quality", ["steps+", "requests", "metrics"])
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
        assert named is None or set(named.split()) <= set(ids), (tag, named)
        if attrs.get("class") == "config" and attrs["id"].startswith(
            "config-"
        ):  # the hash is in the name: two of a model
            assert named.endswith(f"facts-{attrs['id'].removeprefix('config-')}")
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


def test_beyond_ten_configurations_words_narrow_what_is_listed_and_opened():
    configs = [cases.config(f"{i:012x}", name=f"org/model-{i}") for i in range(MANY + 3)]
    some = cases.snapshot(*configs)
    document = read(some, {"filter": "ORG/model-1 h100"})
    listed = [attrs["href"] for attrs in document.all("a") if attrs.get("href", "").startswith("/?config=")]
    assert set(listed) == {f"/?config={i:012x}" for i in (1, 10, 11, 12)}
    (field,) = [attrs for attrs in document.all("input") if attrs.get("name") == "filter"]
    assert field["value"] == "ORG/model-1 h100"
    assert "All 13 configurations" in words(some, {"filter": "model-1"})
    assert "No configuration has all of these words" in words(some, {"filter": "b200"})
    assert 'name="filter"' not in answer(cases.full_snapshot(MANY)).body.decode()


def test_a_configuration_that_was_put_aside_says_why():
    config = msgspec.structs.replace(cases.config(targets={}), quarantined="step_time: ValueError")
    assert "what it had learned is forgotten: step_time: ValueError" in words(cases.snapshot(config))


def test_a_file_for_blis_is_offered_where_it_can_be_had_and_else_said_why():
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "gpu": "H100"}
    known = msgspec.structs.replace(cases.config(), config=shape)
    assert "BLIS file BLIS flags" in words(cases.snapshot(known))
    silent = msgspec.structs.replace(known, targets={})
    for config, why in (
        (cases.config(), "No file for BLIS: --model-config"),
        (silent, "No file for BLIS: step_time: nothing learned yet"),
    ):
        said = words(cases.snapshot(config))
        assert why in said
        assert "BLIS f" not in said.replace("file for BLIS", "")


@pytest.fixture(scope="module")
def history():
    return cases.learned_history()


def test_the_last_rows_and_the_last_day_are_drawn(history):
    text = words(cases.snapshot(), history_of=lambda _: history)
    for title in (
        "Predicted against observed last 500 rows",
        "How far off, over batch",
        "How far off, over context",
        "How far off, over prefill",
        "Error of predictions",
        "Coefficients over the last 24 hours",
    ):
        assert title in text
    assert "Predicted against observed" not in words(cases.snapshot())


def test_what_happened_is_marked_in_every_course(history):
    course = copy.deepcopy(history)
    newest_ns = history.course()[-1].at_ns
    course.changes = [
        Change(newest_ns - 9_000_000_000, ChangeKind.SPEED, 1.2),
        Change(newest_ns - 1_000_000_000, ChangeKind.RESTART),
    ]
    labels = [svg["aria-label"] for svg in read(cases.snapshot(), history_of=lambda _: course).all("svg")]
    marked = [label for label in labels if label.endswith("; ×1.20, restart")]
    assert len(marked) == 1 + len(history.features)


def test_a_restart_of_the_sidecar_is_marked_where_the_course_goes_on_behind_it(history):
    course = history.course()
    started_unix_nano = course[-1].at_ns - 1_000_000_000
    page = StatusPage(
        cases.snapshot,
        registry(),
        ready=lambda: (True, {}),
        unix_nano=lambda: started_unix_nano,
        history_of=lambda _: history,
    )
    assert page.answer(Request("/", (), {}, {})).body.decode().count("; sidecar") == 1 + len(history.features)


def test_the_time_of_a_typical_step_is_shared_out_among_its_terms():
    means = {"prefill_tokens": 10.0, "decode_context_tokens": 2000.0, "requests": 2.0}
    step = cases.target("step_time")
    features = [msgspec.structs.replace(each, mean=means.get(each.name)) for each in step.models["portable"].features]
    model = msgspec.structs.replace(step.models["portable"], features=features)
    target = msgspec.structs.replace(step, models={"portable": model}, mean_us=32_000.0)
    text = words(cases.snapshot(cases.config(targets={"step_time": target})))
    assert "Where a typical step’s 32.0 ms go" in text
    assert "every step 52 % 16.8 ms 10.0 prefill tokens 18 % 5.80 ms" in text
    assert "beyond the coefficients: batch shape, stalls 21 % 6.66 ms" in text
    assert "typical step" not in words(cases.snapshot())


def test_the_waiting_page_names_the_port_that_takes_telemetry():
    elsewhere = StatusPage(
        lambda: None,
        registry(),
        ready=lambda: (True, {}),
        unix_nano=lambda: 0,
        otlp_port=lambda: 24317,
    )
    assert "--otlp-traces-endpoint http://127.0.0.1:24317<" in elsewhere.answer(Request("/", (), {}, {})).body.decode()
    assert "http://127.0.0.1:4317<" in html_of(None, {})


def test_advice_on_a_configuration_names_the_port_that_takes_telemetry():
    config = cases.config(targets={"step_time": cases.target("step_time")}, telemetry="steps+")
    elsewhere = StatusPage(
        lambda: cases.snapshot(config),
        registry(),
        ready=lambda: (True, {}),
        unix_nano=lambda: 0,
        otlp_port=lambda: 24317,
    )
    assert "--otlp-traces-endpoint http://127.0.0.1:24317<" in elsewhere.answer(Request("/", (), {}, {})).body.decode()


def test_a_page_of_counters_that_tells_the_time_outside_the_steps_is_asked_for_nothing_more():
    targets = {name: cases.target(name) for name in ("step_time", "api_queueing")}
    text = words(cases.snapshot(cases.config(targets=targets, telemetry="metrics")))
    assert "Time outside the steps" not in text
    less = {"step_time": cases.target("step_time")}
    assert "--otlp-traces-endpoint" in words(cases.snapshot(cases.config(targets=less, telemetry="metrics")))


def html_of(snapshot, query):
    return answer(snapshot, query).body.decode()


def test_without_a_script_it_is_loaded_again_only_where_that_was_asked_for():
    timed = '<meta http-equiv="refresh"'
    quiet = html_of(cases.snapshot(), {"filter": "a&b"})
    assert timed not in quiet
    assert '<a href="?filter=a%26b&amp;refresh=15">load again every 15 s</a>' in quiet
    asked = html_of(cases.snapshot(), {"filter": "a&b", "refresh": "15"})
    assert f'<noscript>{timed} content="15"></noscript>' in asked
    assert '<a href="?filter=a%26b">stop loading again</a>' in asked
    for wrong in ("0", "1", '15"><script>'):
        assert timed not in html_of(cases.snapshot(), {"refresh": wrong})
    question = {"ask": "predict", "prefill": "5", "requests": "1", "context": "9", "refresh": "15"}
    priced = html_of(cases.snapshot(), question)
    assert "refresh" not in re.search(r'id="what-if".*?</section>', priced, re.DOTALL)[0]


def test_the_page_of_ten_thousand_configurations_is_bounded(history):
    many = cases.snapshot(*(cases.config(f"{i:012x}", targets=cases.config().targets) for i in range(10_000)))
    assert len(answer(many, history_of=lambda _: history).body) < 1_000_000


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_by_wcag_aa_in_both_themes(theme):
    css = CHART_STYLE
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


@pytest.mark.parametrize("steps", [3, 160])
def test_processes_that_nothing_tells_apart_get_the_advice_of_those_that_are_told_apart(steps):
    text = remarks_section(Remarks(conflicting_steps=steps), None)
    assert ("160 steps contradict others" in text) == (steps == 160) == ("service.instance.id=…" in text)


@pytest.mark.parametrize("telemetry", ["requests", "steps"])
def test_publishers_of_a_vllm_without_steps_are_told_why_they_belong_to_nobody(telemetry):
    configs = [msgspec.structs.replace(config, telemetry=telemetry) for config in cases.snapshot().configs]
    known = msgspec.structs.replace(cases.snapshot(), configs=configs)
    text = remarks_section(Remarks(unbound_publishers=2), known)
    assert ("2 KV publishers belong to no engine" in text) == (telemetry == "requests")


def news(*configs):
    """What stands at the top of the page, and the state beside the dot."""
    page = answer(cases.snapshot(*configs)).body.decode()
    banner = page.partition('id="news"')[2].partition("</div>")[0]
    return banner, page.partition('<span class="state ')[2].partition("<")[0]


def drifted(hours_ago):
    """An ordinary configuration whose steps became slower then."""
    since_ns = cases.CREATED_UNIX_NANO - int(hours_ago * 3.6e12)
    step = cases.target("step_time")
    step = msgspec.structs.replace(step, drift=DriftSnapshot(last_unix_nano=since_ns, gain=1.42, count=1))
    return cases.config(targets={"step_time": step})


def test_a_change_of_speed_stands_at_the_top_for_a_day():
    banner, state = news(drifted(23))
    assert "meta-llama/Llama-2-7b-hf: steps take 1.42 × as long since" in banner
    assert state == 'fair">ready, 1 problem'
    assert news(drifted(25)) == ("", 'ok">ready')


def test_what_is_put_aside_or_in_doubt_stands_at_the_top():
    calm = drifted(25)
    aside = msgspec.structs.replace(calm, config_id="a", quarantined="step_time: ValueError", targets={})
    doubted = msgspec.structs.replace(calm, config_id="b", doubts=["<its> clock is too coarse"])
    banner, state = news(aside, doubted)
    assert "put aside" in banner
    assert "not usable: &lt;its&gt; clock is too coarse" in banner
    assert state == 'fair">ready, 2 problems'


def test_of_much_news_the_first_and_the_number_of_the_rest_are_shown():
    configs = [msgspec.structs.replace(drifted(1), config_id=str(number)) for number in range(50)]
    banner, _ = news(*configs)
    assert banner.count("<a ") == 6
    assert "44 more" in banner
