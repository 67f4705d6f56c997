"""Words of the documents are words of the program, links lead somewhere, and constants are the code's."""

import re
from enum import Enum

import pytest
import yaml

from collector.cli import tracefit
from collector.config import Config, every_key, load
from collector.ingest.zmq import QUEUE_MAX
from collector.join.inferred.kv import MOVES_MAX
from collector.telemetry import reasons
from collector.telemetry.table import FLEET_TABLE, PREFIX, TABLE
from exporters.metrics_page import FAMILIES, PAGE_FAMILIES
from exporters.wording import STATUS
from online import change
from online.change import DETECTORS
from online.constants import ALARM_KEEP, FEW_ROWS, HALF_LIFE_STEPS, NOISE_ROWS
from online.level import HALF_LIVES_ROWS
from online.river import ROWS_PER_S
from online.rls import IDENTIFIED_ERROR, VIF_MAX
from online.rows import RowOutcome
from online.snapshot import Reason
from online.target.settings import RESIDUAL
from online.target.target_state import WARM_UP_ROWS
from tests.support.command_lines import every_command, options_of
from tests.support.docs_tables import assert_table, make_table
from tests.support.kv_batches import FIELDS
from tests.support.paths import DOCS, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
METRICS = {metric.exposed_name for metric in (*TABLE, *FLEET_TABLE)} | {
    family.name for family in (*FAMILIES, *PAGE_FAMILIES)
}
OWN_WORDS = {"tracefit_vllm", "tracefit_version"}
"""Names that begin like metrics: the plugin's package, a key of the snapshot."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_metric_that_a_document_names_exists(document):
    named = set(re.findall(rf"\b{PREFIX}[a-z_]+[a-z]\b", document.read_text(encoding="utf-8"))) - OWN_WORDS
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    assert named <= {f"{name.removesuffix('_total')}{suffix}" for name in METRICS for suffix in suffixes}


def test_each_key_command_and_reason_that_a_user_is_told_of_exists():
    text = (DOCS / "runbooks.md").read_text(encoding="utf-8").partition("## The page says")[2]
    assert text
    assert set(re.findall(r"`tracefit ([a-z-]+)", text)) <= {*tracefit.commands}
    enums = [
        each for each in (*vars(reasons).values(), RowOutcome) if isinstance(each, type) and issubclass(each, Enum)
    ]
    known = {str(value) for each in enums for value in each} | {key.name for key in every_key()}
    words = set(re.findall(r"`([a-z]+_[a-z]+)`", text))
    assert words <= known | {"decode_context_tokens", "api_queueing", "tracefit_usable"}


def test_every_bound_and_event_of_the_kv_cache_is_told():
    text = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    for told in (*(f"`{event}`" for event in FIELDS), f"{QUEUE_MAX:,}", f"{MOVES_MAX:,}"):
        assert told in text.replace("\n", " ")


def command_lines():
    """Where a document or a manifest has ``tracefit`` with a command behind it: the file, and the words."""
    named = "|".join(tracefit.commands)
    for file in (*DOCUMENTS, *(path for path in (ROOT / "deploy").rglob("*") if path.suffix in {".md", ".yaml"})):
        for line in re.findall(rf"\btracefit ((?:{named})\b[^`\n|>#]*)", file.read_text(encoding="utf-8")):
            yield file, line.split()


def test_every_option_in_a_command_line_of_a_document_exists():
    wrong, known = [], dict(every_command())
    for file, words in command_lines():
        name = words[0] if words[0] in known else " ".join(words[:2])
        options = {word.partition("=")[0].strip("[],()") for word in words if re.match(r"\[?-{1,2}[a-z]", word)}
        has = {each for option in options_of(known[name]) for each in option.opts} if name in known else set()
        wrong += [f"{file.name}: {name} {each}" for each in options - has - {"--help"}]
    assert wrong == []


def links_of(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    return [link for link in found if not link.startswith(("http://", "https://", "mailto:"))]


def navigated(entries):
    for entry in entries:
        for value in entry.values():
            yield from navigated(value) if isinstance(value, list) else [value]


def anchors_of(document):
    heads = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for link in links_of(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link


def test_the_readme_leads_to_every_document():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links_of(ROOT / "README.md")}
    assert set(DOCUMENTS[1:]) <= linked


def test_every_document_is_in_the_navigation_of_the_site_once():
    text = re.sub(r"!!python/name:\S+", "null", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(navigated(yaml.safe_load(text)["nav"])) == [path.name for path in DOCUMENTS[1:]]


def test_every_key_stands_in_the_table():
    rows = [(f"`{key.name}`", key.meaning, key.values, f"`{key.default}`") for key in every_key()]
    assert_table("configuration.md", "configuration", make_table(["key", "what it does", "values", "default"], rows))


def test_the_examples_are_configurations(tmp_path):
    examples = re.findall(r"```yaml\n(.*?)```", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        (tmp_path / "tracefit.yaml").write_text(example)
        assert load(tmp_path / "tracefit.yaml", {}) != load(None, {})


def test_every_fault_is_proved_by_a_test_that_exists():
    text = (DOCS / "reliability.md").read_text(encoding="utf-8")
    proofs = re.findall(r"\| `(test_\w+)` \|", text)
    faults = text.split("## Faults")[1].split("## Not promised")[0]
    assert len(proofs) == len(re.findall(r"^\| ", faults, re.MULTILINE)) - 1 >= 20, "all rows but the head"
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in proofs if f"def {name}(" not in tests] == []


LEARNING = (DOCS / "learning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"count half after (\d+) steps", HALF_LIFE_STEPS),
        (r"what the last (\d+) to \d+ rows", HALF_LIVES_ROWS[0]),
        (r"what the last \d+ to (\d+) rows", HALF_LIVES_ROWS[-1]),
        (r"block: (\d+) rows until", NOISE_ROWS),
        (r"rows until (\d+) are learned", WARM_UP_ROWS),
        (r"learned, then (\d+) rows", Config().block_rows),
        (r"or (\d+) second of event time", Config().block_s),
        (r"2p \+ 1 windows of (\d+) rows", NOISE_ROWS),
        (r"standard error (\d+) % of it", 100 * IDENTIFIED_ERROR),
        (r"`vif` above (\d+)", VIF_MAX),
        (r"Medians of\s+(\d+) rows", NOISE_ROWS),
        (r"in medians of (\d+)\.", FEW_ROWS),
        (r"Below (\d+) % nothing is a change", 100 * change.EFFECT_MIN),
        (r"keeps (\d+) % of its weight", 100 * ALARM_KEEP),
        (r"sees (\d+) rows per second", ROWS_PER_S),
    ],
)
def test_a_number_in_the_document_is_the_one_in_the_code(said, value):
    found = re.search(said, LEARNING)
    assert found, said
    assert float(found.group(1)) == pytest.approx(value)


def test_every_status_reason_detector_and_the_residual_model_is_named():
    for name in (*STATUS, *DETECTORS, RESIDUAL):
        assert f"`{name}`" in LEARNING
    reasons = LEARNING.split("<!-- reasons -->")[1].split("<!-- end -->")[0]
    assert re.findall(r"^\| `(\w+)` \|", reasons, re.MULTILINE) == [*Reason]
