"""docs/telemetry.md says of KV events what the code does: metrics, keys, defaults, events."""

from __future__ import annotations

import re

from collector.decode.kv import EVENTS
from collector.ingest.zmq import QUEUE_MESSAGES
from collector.join.inferred.kv import BATCHES_MAX
from collector.telemetry.table import TABLE
from tests.support.kv_batches import FIELDS
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "telemetry.md").read_text()


def test_every_metric_named_exists():
    named = set(re.findall(r"tracefit_[a-z_]+", TEXT)) - {"tracefit_vllm"}
    assert named
    assert named <= {metric.exposed_name for metric in TABLE}


def test_every_key_and_every_bound_is_told():
    assert "kv: [" in TEXT
    assert f"{QUEUE_MESSAGES:,}" in TEXT.replace("\n", " ")
    assert f"{BATCHES_MAX:,}" in TEXT


def test_every_event_is_told_and_known():
    assert set(FIELDS) == set(EVENTS)
    for event in EVENTS:
        assert f"`{event}`" in TEXT
