"""Words of the documents are words of the program: each that is printed is explained, each that is named exists."""

from __future__ import annotations

import re
from enum import Enum

import pytest

from collector.cli import tracefit
from collector.config import every_key
from collector.decode.kv import EVENTS
from collector.ingest.zmq import QUEUE_MESSAGES
from collector.join.inferred.kv import BATCHES_MAX
from collector.telemetry import reasons
from collector.telemetry.table import FLEET_TABLE, PREFIX, TABLE
from exporters.metrics_page import FAMILIES, PAGE_FAMILIES
from online.rows import RowOutcome
from tests.support.kv_batches import FIELDS
from tests.support.paths import DOCS, ROOT

DOCUMENTS = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
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
    keys = {key.name for key in every_key()}
    commands = set(tracefit.commands)
    assert set(re.findall(r"`tracefit ([a-z-]+)", text)) <= commands
    enums = [
        each for each in (*vars(reasons).values(), RowOutcome) if isinstance(each, type) and issubclass(each, Enum)
    ]
    known = {str(value) for each in enums for value in each}
    words = (
        set(re.findall(r"`([a-z]+_[a-z]+)`", text))
        - keys
        - {"decode_context_tokens", "api_queueing", "tracefit_usable"}
    )
    assert words <= known


def test_every_bound_and_event_of_the_kv_cache_is_told():
    text = (DOCS / "telemetry.md").read_text(encoding="utf-8")
    assert set(FIELDS) == set(EVENTS)
    for told in (*(f"`{event}`" for event in EVENTS), f"{QUEUE_MESSAGES:,}", f"{BATCHES_MAX:,}"):
        assert told in text.replace("\n", " ")
