"""docs/tutorial-throttled.md: the recording that becomes slow is made and learned, and page, metric and rule say so."""

from __future__ import annotations

import re

import yaml

from collector.commands.demo import find_recording, read_index, throttling
from collector.recordings import Recording
from tests.support.paths import DOCS, ROOT
from tests.support.tutorials import assert_said, page_of, said, served, steps_of
from tracefit import load

TEXT = (DOCS / "tutorial-throttled.md").read_text(encoding="utf-8")
FACTOR = 1.4


def test_a_throttled_machine_is_seen_where_the_tutorial_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEFIT_LEARNERS", "[rls]")
    live, *steps = steps_of(TEXT)
    assert live.command == f"tracefit demo --throttle {FACTOR}"
    made = [step for step in steps if "--save" in step.command]
    for step in made:
        assert_said(step)
    slow = throttling(read_index(find_recording(None)), FACTOR)
    with served(
        (timed.export for timed in Recording(tmp_path / "throttled.pb.gz", print).exports()), slow.slow_unix_ns
    ) as sidecar:
        for step in steps:
            if step not in made:
                assert_said(step, sidecar)
        page, snapshot = page_of(sidecar), load(sidecar)
        document = said("curl http://localhost:9464/snapshot", sidecar)
    for title in re.findall(r"^\* \*(.+?)\*", TEXT, re.MULTILINE):
        assert title in page
    assert "<dt>last change of speed</dt><dd>×1.47, " in page
    assert '<text class="mark"' in page
    assert snapshot.config().usable
    (changed_unix_nano,) = re.findall(r'"last_unix_nano": (\d+)', document)
    assert f"It took {(int(changed_unix_nano) - slow.slow_unix_ns) / 1e9:.0f} recorded seconds" in TEXT


def test_the_alert_is_the_one_that_is_deployed():
    (quoted,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1])
    groups = yaml.safe_load((ROOT / "deploy" / "monitoring" / "rules.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert rules[quoted["alert"]] == quoted["expr"]
