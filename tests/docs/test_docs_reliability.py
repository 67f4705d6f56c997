"""docs/reliability.md: every fault names a test that exists, every key and metric is one."""

from __future__ import annotations

import re

from collector.config.schema import Config
from collector.telemetry.table import TABLE
from tests.support.paths import DOCS

TEXT = (DOCS / "reliability.md").read_text(encoding="utf-8")
ROOT = DOCS.parent


def test_every_fault_is_proved_by_a_test_that_exists():
    proofs = re.findall(r"\| `(tests/\S+)::(\w+)` \|", TEXT)
    faults = TEXT.split("## Faults")[1].split("## Not promised")[0]
    assert len(proofs) == len(re.findall(r"^\| ", faults, re.MULTILINE)) - 1 >= 20, "all rows but the head"
    for path, name in proofs:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name


def test_every_metric_it_names_exists():
    known = {metric.exposed_name for metric in TABLE}
    named = set(re.findall(r"`(tracefit_\w+)", TEXT))
    assert named
    assert named <= known


def test_every_key_it_names_is_one():
    config = Config()
    for section, key in re.findall(r"`(state|log|snapshot)\.([a-z_]+)[:`]", TEXT):
        if key != "bin":
            assert hasattr(getattr(config, section), key), f"{section}.{key}"
    assert config.durability == "memory", "the default, as the document says"
