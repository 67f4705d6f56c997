"""The status page as a document: complete without scripts, safe, and readable by all."""

import base64
import hashlib
import html
import re
from html.parser import HTMLParser

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from exporters.what_if import Advisory, WorkloadProfile
from exporters.wording import QUALITY, REASONS, STATUS, advice_for, pending_sentence
from online import Reason
from online.rows import Quality
from online.snapshot import DriftSnapshot
from tests.support import exporter_cases as cases
from tests.support.pages import answer_to

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
    spans = Counter("tracefit_receiver_spans", "Spans.", ["transport", "outcome"], registry=own)
    spans.labels("grpc", "accepted").inc(1200)
    spans.labels("grpc", "queue_full").inc(7)
    spans.labels("grpc", "shutting_down")
    dropped = Counter("tracefit_join_dropped_rows", "Intervals.", ["reason"], registry=own)
    for is_no_loss in ("idle", "known_from_steps"):
        dropped.labels(is_no_loss).inc()
    return own


NOW = cases.CREATED_UNIX_NANO + 4_000_000_000


def answer(snapshot, own=None, ready=True, query="", now=NOW, **kwargs):
    own = registry() if own is None else own
    return answer_to(f"/{query}", snapshot, own, ready=lambda: (ready, {}), unix_nano=now, **kwargs)


def read(snapshot, **kwargs):
    return Document(answer(snapshot, **kwargs).body.decode())


def test_the_address_of_a_configuration_shows_it_or_says_that_there_is_none():
    names = [f"{number:012x}" for number in range(201)]
    many = cases.snapshot(*map(cases.config, names))
    last, unknown = (answer(many, query=f"?config={name}") for name in (names[-1], "zzz"))
    assert f'id="details-{names[-1]}"' in last.body.decode()
    assert (unknown.status, unknown.body.decode().startswith("config: ")) == (404, True)


def words(snapshot, **kwargs):
    return " ".join(" ".join(read(snapshot, **kwargs).words).split())


def test_a_person_finds_the_coefficients_with_their_uncertainty():
    text = words(cases.snapshot())
    numbers = ("16.8 ms", "3.1 %", "580 µs/token", "70.0 ns/token", "1.30 ms/request")  # 1.96 / 64
    for expected in (*numbers, "meta-llama/Llama-2-7b-hf", "identified", "1.1 % in the median"):
        assert expected in text


def test_of_a_merged_state_the_engines_that_differ_stand_first_with_their_ratio():
    text = words(cases.snapshot())
    assert "3 engines, each against the others: 1 differs by more than the errors" in text
    assert "; engines of another speed: 1" in text
    assert "vllm-7 differs ×1.600 ± 0.015 400 vllm-0 ×0.969 ± 0.061 800 unknown – 3" in text
    assert "against the others" not in words(cases.full_snapshot(1))


@pytest.mark.parametrize(
    ("diagnosis", "said"),
    [({"status": status}, meaning) for status, meaning in STATUS.items() if status != "identified"]
    + [({"status": "weak", "reason": reason}, REASONS[reason]) for reason in Reason],
)
def test_a_coefficient_that_is_not_sure_says_what_is_the_matter(diagnosis, said):
    model = cases.model(cases.PORTABLE["step_time"])
    features = [msgspec.structs.replace(feature, **diagnosis) for feature in model.features]
    models = {"portable": msgspec.structs.replace(model, features=features)}
    text = words(cases.snapshot(stepping(models=models)))
    assert f"{diagnosis['status'].replace('_', ' ')} {said}" in text


def stepping(telemetry="steps", **of_target):
    """A configuration of which nothing but the time of steps is known."""
    step = msgspec.structs.replace(cases.target("step_time"), **of_target)
    return cases.config(targets={"step_time": step}, telemetry=telemetry)


ALL_SAID = "20 requests complete it; where none come, let it send them: --otlp-traces-endpoint http://127.0.0.1:24317"


@pytest.mark.parametrize(
    ("config", "levels", "said"),
    [
        (cases.config(), ["good"], ""),
        (stepping(), ["good", "fair"], "--enable-journey-tracing"),
        (stepping("steps+"), ["good", "fair"], ALL_SAID),
        (stepping("requests"), ["fair"], "Put the tracefit producer plugin into the vLLM image"),
        (stepping("metrics"), ["fair", "fair"], ALL_SAID),
        (msgspec.structs.replace(stepping("?"), config={}), ["poor", "fair", "fair"], "vllm.model="),
    ],
)
def test_advice_says_what_is_missing_for_this_telemetry_with_the_port_that_takes_it(config, levels, said):
    assert set(QUALITY) == {quality.label for quality in Quality} | {"merged"}
    assert [advice.level for advice in advice_for(config)] == levels
    text = words(cases.snapshot(config), otlp_port=lambda: 24317)
    assert said in text
    assert ("journey-tracing" in text) == (config.telemetry == "steps" and bool(said)), "a fork's flag"


def test_before_the_first_snapshot_it_says_how_to_begin():
    assert re.search("Waiting for telemetry .* --otlp-traces-endpoint http://127.0.0.1:4317", words(None))


def test_losses_are_shown_by_reason_and_what_did_not_happen_is_folded():
    text = words(cases.snapshot())
    assert re.search("telemetry was left out.* queue full 7.* What came in.* in between 1 known from richer .* 1", text)
    assert "shutting_down" not in text
    quiet = words(cases.snapshot(), own=CollectorRegistry(), ready=False)
    assert re.search(r"not ready .* Nothing was lost or left out\.", quiet)


def test_the_policy_allows_exactly_the_style_and_the_script_that_are_there_and_nothing_comes_from_elsewhere():
    response = answer(cases.snapshot())
    policy = dict(response.headers)["Content-Security-Policy"]
    text = response.body.decode()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|url\(", text)
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
    document = read(cases.snapshot(msgspec.structs.replace(config, targets={nasty: step}), cases.config()))
    assert len(document.all("script")) == 1
    assert document.all("img") == []
    assert html.unescape(nasty.splitlines()[0])[:100] in "".join(document.words)


def test_a_file_for_blis_is_offered_where_it_can_be_had_and_else_said_why():
    known = cases.config_for_blis()
    assert "BLIS file" in words(cases.snapshot(known))
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
        "Coefficients over the last 24 hours",
        "every step now 16.8 ms",
    ):
        assert title in text
    assert "Predicted against observed" not in words(cases.snapshot())
    lines = read(cases.snapshot(), history_of=lambda _: history).all("polyline")
    assert lines[0] == {"class": "zero", "points": "52.0,192.0 348.0,22.0"}, "from corner to corner: there it is right"
    assert {line["points"].rpartition(" ")[2].partition(",")[0] for line in lines[1:]} == {"348.0"}, "up to now"


def test_the_page_of_two_thousand_configurations_is_bounded(history):
    many = cases.snapshot(*(cases.config(f"{i:012x}", targets=cases.config().targets) for i in range(2000)))
    assert len(answer(many, history_of=lambda _: history).body) < 1_000_000


# --- who sends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [None, cases.snapshot()])
def test_the_page_says_in_one_sentence_what_is_pending(snapshot):
    assert "not learned yet" not in words(snapshot)
    shown = words(snapshot, pending=lambda: pending_sentence(2, 1852, 1, 0, 10**18))
    assert "1,852 steps, 1 request of 2 senders, not learned yet" in shown
    assert "at 01:46:40 UTC at the latest." in shown


def busy():
    mix = WorkloadProfile(400.0, 247.0, 0.25, 12.0, 12.0, 41_000.0, 310_000.0)
    return Advisory(lambda _: mix, (50.0,))


def test_the_verdict_stands_first_with_what_was_predicted_and_observed_and_what_fits():
    text = words(cases.snapshot(), advisory=busy())
    bar = text.partition("Llama-2-7b-hf H100 · TP 2")[2].partition("step time =")[0]
    for said in (
        "usable",
        "steps 20.0 ms",
        "ITL 40.2 ms predicted, 41.0 ms observed",
        "16 fit ITL 50 ms",
        "last row 5 s",
        "steps take 1.20 × as long since 07:59 UTC: no single term is sure and 1 more",
    ):
        assert said in bar
    assert "rows learned from 1,154" in bar
    assert "last change of speed ×1.20" in bar
    assert text.index("usable") < text.index("What if") < text.index("± (95 %)")


def test_the_form_is_filled_with_the_load_of_the_last_minutes():
    document = read(cases.snapshot(), advisory=busy())
    filled = {field["name"]: field["value"] for field in document.all("input") if field["value"]}
    usual = {"prompt": "400", "output": "247", "prefix_hit": "0.25", "itl": "50ms", "concurrency": "12"}
    assert usual.items() <= filled.items()


def news(*configs):
    """What stands at the top of the page, and the state beside the dot."""
    page = answer(cases.snapshot(*configs)).body.decode()
    banner = page.partition('id="news"')[2].partition("</div>")[0]
    return banner, page.partition('<span class="state ')[2].partition("<")[0]


def drifted(hours_ago):
    """An ordinary configuration whose steps became slower then."""
    since_ns = cases.CREATED_UNIX_NANO - int(hours_ago * 3.6e12)
    return stepping(drift=DriftSnapshot(last_unix_nano=since_ns, gain=1.42, count=1))


def test_what_is_quarantined_or_in_doubt_stands_at_the_top():
    calm = drifted(25)
    aside = msgspec.structs.replace(calm, config_id="a", quarantined="step_time: ValueError", targets={})
    doubted = msgspec.structs.replace(calm, config_id="b", doubts=["<its> clock is too coarse"])
    banner, state = news(aside, doubted)
    assert "quarantined" in banner
    assert "what it had learned is forgotten: step_time: ValueError" in words(cases.snapshot(aside))
    assert "not usable: &lt;its&gt; clock is too coarse" in banner
    assert state == 'fair">ready, 2 problems'
    assert news(calm) == ("", 'ok">ready')
