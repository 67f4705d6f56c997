"""docs/slower.md: the recording that becomes slow is made and learned, and page and metric say so."""

from __future__ import annotations

import json
import re

from collector.commands.demo import find_recording, read_index, restamped, throttling
from collector.recordings import Recording
from tests.support.paths import DOCS
from tests.support.tutorials import assert_said, page_of, said, served, steps_of
from tracefit import load

TEXT = (DOCS / "slower.md").read_text(encoding="utf-8")
FACTOR = 1.4


def test_a_throttled_machine_is_seen_where_the_tutorial_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthy").mkdir()
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")
    live, *steps = steps_of(TEXT)
    assert live.command == f"tracefit demo --throttle {FACTOR}"
    recording = find_recording(None)
    said(f"tracefit replay {recording} -o healthy/snapshot.json")
    slow = throttling(read_index(recording), FACTOR)
    exports = Recording(recording, print).exports()
    with served(
        (each._replace(payload=restamped(each.payload, slow)) for each in exports), slow.slow_unix_ns
    ) as sidecar:
        for step in steps:
            assert_said(step, sidecar)
        page, snapshot = page_of(sidecar), load(sidecar)
        document = said("curl http://localhost:9464/snapshot", sidecar)
    for title in re.findall(r"^\* \*(.+?)\*", TEXT, re.MULTILINE):
        assert title in page
    assert "<dt>last change of speed</dt><dd>×1.47, " in page
    assert '<text class="mark"' in page
    assert snapshot.config().usable
    (config,) = json.loads(document)["configs"]
    changed_unix_nano = config["targets"]["step_time"]["drift"]["last_unix_nano"]
    assert abs(changed_unix_nano - slow.slow_unix_ns) < 1e9, "the moment that is told is the true one"
