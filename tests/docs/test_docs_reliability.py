"""docs/reliability.md: every fault names a test that exists."""

from __future__ import annotations

import re

from tests.support.paths import DOCS

TEXT = (DOCS / "reliability.md").read_text(encoding="utf-8")
ROOT = DOCS.parent


def test_every_fault_is_proved_by_a_test_that_exists():
    proofs = re.findall(r"\| `(tests/\S+)::(\w+)` \|", TEXT)
    faults = TEXT.split("## Faults")[1].split("## Not promised")[0]
    assert len(proofs) == len(re.findall(r"^\| ", faults, re.MULTILINE)) - 1 >= 20, "all rows but the head"
    for path, name in proofs:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
