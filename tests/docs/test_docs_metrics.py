"""What the documents say of metrics, snapshot and BLIS is what the code does."""

from __future__ import annotations

import json
import os
import re

import msgspec
import pytest

from collector.telemetry.metrics import Metrics
from collector.telemetry.table import FLEET_TABLE, TABLE
from exporters.metrics_page import DEFAULT_MAX_SERIES, FAMILIES, PAGE_FAMILIES, snapshot_families
from exporters.what_if import Advisory, WorkloadProfile
from exporters.wording import STATUS
from online import snapshot as schema
from online.rows import Target
from online.snapshot import SCHEMA, Snapshot
from tests.support import exporter_cases as cases
from tests.support.docs_tables import assert_table, make_table
from tests.support.paths import DOCS

METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
STRUCTS = (
    *(schema.Snapshot, schema.ConfigSnapshot, schema.EngineSnapshot, schema.TargetSnapshot, schema.ModelSnapshot),
    *(schema.FeatureSnapshot, schema.ErrorSnapshot, schema.IntervalSnapshot, schema.ShapeFactorSnapshot),
    *(schema.CorrectionSnapshot, schema.SeenSnapshot, schema.ReplicaSnapshot, schema.ResidualSnapshot),
    schema.DriftSnapshot,
)


def code(text):
    return f"`{text}`"


def test_metrics_md_lists_every_family_of_the_snapshot():
    implied = {"config", "vector"}
    rows = [
        (
            code(family.name.removeprefix("tracefit_")),
            "identity"
            if len(family.labels) > 8
            else " ".join(label for label in family.labels if label not in implied),
            family.help,
        )
        for family in FAMILIES
    ]
    assert_table("metrics.md", "snapshot", make_table(("`tracefit_` …", "labels", "meaning"), rows))


@pytest.mark.parametrize(("name", "metrics"), [("process", TABLE), ("fleet", FLEET_TABLE)])
def test_metrics_md_lists_every_metric_of_the_page_and_of_the_process(name, metrics):
    listed = {metric.exposed_name: [label for label, _ in metric.labels] for metric in metrics}
    listed |= {family.name: [*family.labels] for family in PAGE_FAMILIES} if name == "process" else {}
    by_part: dict[str, list[str]] = {}
    for metric, labels in listed.items():
        part, _, rest = metric.removeprefix("tracefit_").partition("_")
        by_part.setdefault(part, []).append(rest + (f"{{{','.join(labels)}}}" if labels else ""))
    rows = [(code(part), " ".join(map(code, names))) for part, names in by_part.items()]
    assert_table("metrics.md", name, make_table(("`tracefit_` …", "… and after the next `_`"), rows))


def test_metrics_md_states_the_bound_that_fifty_configurations_fit_and_the_targets():
    text = " ".join(METRICS.split())
    own = sum(1 for family in Metrics().registry.collect() for s in family.samples if not s.name.endswith("_created"))
    snapshot, mix = (
        cases.full_snapshot(50),
        WorkloadProfile(400.0, 247.0, 0.25, 4.0, 4.0, itl_us=41_000.0, ttft_us=310_000.0),
    )
    advisory = Advisory(lambda _: mix)
    shown = [(family.name, len(family.samples)) for family in snapshot_families(snapshot, advisory)]
    assert len(dict(shown)) == len(shown)
    series = sum(number for _, number in shown)
    assert own + series <= 7100
    assert series <= DEFAULT_MAX_SERIES + len(PAGE_FAMILIES)
    assert f"at most {DEFAULT_MAX_SERIES:,} series" in text
    needed = series - len(PAGE_FAMILIES)
    assert f"need {needed:,}, {needed // 50} each" in text
    row = next(line for line in METRICS.splitlines() if line.startswith("| `target` |"))
    assert re.findall(r"`(\w+)`", row)[1:] == [target.value for target in Target]


def test_the_first_table_of_metrics_md_has_the_five_numbers_that_exist():
    first = METRICS.split("\n\n")[2]
    assert first.count("\n|") == 6
    assert set(re.findall(r"`(tracefit_\w+)", first)) <= {family.name for family in FAMILIES}


def json_schema():
    """JSON Schema of the snapshot; its ``schema`` key is a constant, and unknown keys are allowed."""
    made = msgspec.json.schema(Snapshot)
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}
    made["$defs"]["Snapshot"]["properties"]["schema"] = {"const": SCHEMA}
    made["$defs"]["Snapshot"]["required"].append("schema")
    for struct in made["$defs"].values():  # a docstring is indented before Python 3.13, and not since
        if "description" in struct:
            struct["description"] = " ".join(struct["description"].split())
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def test_the_json_schema_is_that_of_the_structs():
    path = DOCS / "snapshot.schema.json"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(json_schema())
    assert path.read_text() == json_schema()


def test_snapshot_md_lists_every_key_and_every_status():
    rows = []
    for struct in STRUCTS:
        words = " ".join((struct.__doc__ or "").split())
        keys = [
            code(f.encode_name) if f.required else f"{code(f.encode_name)}?" for f in msgspec.structs.fields(struct)
        ]
        rows.append((struct.__name__.removesuffix("Snapshot") or "document", ", ".join(keys), words.replace("``", "`")))
    assert_table("snapshot.md", "keys", make_table(("of", "keys (? = may be absent)", "meaning"), rows))
    rows = [(code(status), meaning) for status, meaning in STATUS.items()]
    assert_table("snapshot.md", "status", make_table(("status", "meaning"), rows))
