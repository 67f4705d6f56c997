"""Alerts and dashboard: valid, tested, documented, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import pairwise

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from collector.telemetry import Metrics, table
from exporters.labels import base_unit
from exporters.prometheus import MetricsPage
from exporters.prometheus.families import FAMILIES, PAGE_FAMILIES
from tests.conftest import find_tool
from tests.support import exporter_cases as cases
from tests.support.paths import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
RUNBOOKS = "https://docs.example.com/tracefit/runbooks.md"
PANEL_KINDS = {"timeseries", "stat", "table", "heatmap"}


def rules():
    return yaml.safe_load((MONITORING / "rules.yaml").read_text())


def alerts():
    return {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}


def dashboard():
    return json.loads((MONITORING / "dashboard.json").read_text())


def panels():
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions():
    found = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    found += [(a["name"], a["expr"]) for a in dashboard()["annotations"]["list"]]
    return found


def known_series():
    """Names that can stand in an expression: ours, the process's, and what the rules record."""
    telemetry = pytest.importorskip("collector.telemetry.table", reason="the process's own table is not in this tree")
    names = {family.name for family in (*FAMILIES, *PAGE_FAMILIES)}
    for family in FAMILIES:
        suffixes = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}.get(family.kind, ())
        names |= {f"{family.name}_{suffix}" for suffix in suffixes}
    for metric in (*telemetry.TABLE, *telemetry.FLEET_TABLE):
        names.add(metric.exposed_name)
        if metric.kind is telemetry.Kind.HISTOGRAM:
            names |= {f"{metric.exposed_name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return names | {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def series_in(expression):
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:tracefit|process)_[a-z0-9_]+\b", bare))


def promtool(*arguments, directory=MONITORING):
    command = [find_tool("promtool"), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_the_rules_pass_promtool_and_their_own_tests():
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_stays_quiet():
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    fires, quiet = set(), set()
    for test in tests:
        for case in test.get("alert_rule_test", ()):
            assert test["input_series"]
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fires == quiet == set(alerts())


def test_the_operator_gets_the_same_rules():
    resource = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
    assert resource["spec"]["groups"] == rules()["groups"]


def test_every_alert_says_what_it_is_how_grave_and_what_to_do():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == list(alerts())
    for name, alert in alerts().items():
        assert name.startswith("Tracefit")
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"]["summary"].endswith(".")
        assert "{{" not in alert["annotations"]["summary"]
        assert "$labels.instance" in alert["annotations"]["description"]
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"


def test_every_series_in_rules_runbooks_and_dashboard_exists():
    known = known_series()
    for group in rules()["groups"]:
        for rule in group["rules"]:
            assert series_in(rule["expr"]) <= known, rule
    for title, expression in expressions():
        assert series_in(expression), title
        assert series_in(expression) <= known, title
    for variable in dashboard()["templating"]["list"]:
        assert series_in(str(variable["query"])) <= known
    assert series_in((ROOT / "docs" / "runbooks.md").read_text()) <= known


def test_every_expression_of_the_dashboard_parses(tmp_path):
    substituted = [
        {"record": f"panel:{n}", "expr": expr.replace("$__rate_interval", "5m").replace("$__range", "6h")}
        for n, (_, expr) in enumerate(expressions())
    ]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": substituted}]}))
    done = promtool("check", "rules", "panels.yaml", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(substituted)} rules found" in done.stdout


def test_a_broken_expression_would_be_noticed(tmp_path):
    (tmp_path / "panels.yaml").write_text('groups: [{name: x, rules: [{record: "a:b", expr: "sum(up"}]}]')
    assert promtool("check", "rules", "panels.yaml", directory=tmp_path).returncode != 0


def test_the_dashboard_has_an_identity_and_cannot_be_edited_by_accident():
    board = dashboard()
    assert (board["uid"], board["editable"]) == ("tracefit", False)
    assert board["title"]
    assert board["description"]
    assert board["schemaVersion"] >= 36
    assert "tracefit" in board["tags"]


def test_variables_choose_the_data_source_job_instance_and_configuration():
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance", "config", "target", "model"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name, variable in variables.items():
        assert variable["label"]
        if name != "datasource":
            assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
            assert variable["refresh"] == 2  # on time range change
            assert variable["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_has_title_description_unit_and_the_chosen_data_source(panel):
    assert panel["type"] in PANEL_KINDS
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert target["legendFormat"] or target["format"] == "table"


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_expression_selects_job_and_instance_and_rates_counters_rightly(title, expression):
    for selector in re.findall(r"[a-z_]+\{([^}]*)\}", expression):
        assert 'job=~"$job"' in selector, title
        assert 'instance=~"$instance"' in selector, title
    for name in series_in(expression):
        wrapped = re.search(rf"(?:rate|increase)\({name}\{{[^}}]*\}}\[(\$__rate_interval|\$__range)\]\)", expression)
        assert bool(wrapped) == name.endswith(("_total", "_bucket", "_sum", "_count")), (title, name)


def test_panels_have_their_own_ids_and_do_not_overlap():
    board = dashboard()["panels"]
    ids = [panel["id"] for panel in board]
    assert len(ids) == len(set(ids))
    places = sorted((p["gridPos"]["y"], p["gridPos"]["x"], p["gridPos"]["w"]) for p in board)
    for (y, x, w), (next_y, next_x, _) in pairwise(places):
        assert next_y > y or next_x >= x + w
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board)


def test_units_of_coefficient_panels_are_those_that_the_exporter_writes():
    asked = set(re.findall(r'unit="([a-z_]+)"', json.dumps(dashboard()).replace('\\"', '"')))
    assert asked == {base_unit(unit)[0] for unit in ("us", "us/token", "us/request")}


def idle_series():
    """Everything on the page, at a standstill for an hour, as promtool's input."""
    own = Metrics(CollectorRegistry())
    own.set(table.QUEUE_CAPACITY, 16 * 2**20)
    page = MetricsPage(own.registry, cases.snapshot).render()
    for family in text_string_to_metric_families(page.body.decode()):
        for sample in family.samples:
            labels = {"job": "tracefit", "instance": "pod-1:9464", **sample.labels}
            text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            yield {"series": f"{sample.name}{{{text}}}", "values": f"{sample.value}x60"}


def shipped_expressions():
    """Of rules, dashboard and docs/metrics.md, with the dashboard's variables as Grafana fills them in."""
    yield from (rule["expr"] for group in rules()["groups"] for rule in group["rules"])
    for _, expression in expressions():
        timed = expression.replace("$__rate_interval", "5m").replace("$__range", "30m")
        yield re.sub(r"\$\w+", ".*", timed)
    (block,) = re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    yield from ("\n".join(lines.splitlines()[1:]).replace("[1h]", "[30m]") for lines in block.split("\n\n"))


def test_no_shipped_expression_is_nan_while_nothing_happens(tmp_path):
    asked = [*shipped_expressions(), 'tracefit_rows_total{target="step_time",outcome="learned"} * NaN']
    checks = [{"expr": f"({expr}) != ({expr})", "eval_time": "50m", "exp_samples": []} for expr in asked]
    test = {"interval": "1m", "input_series": list(idle_series()), "promql_expr_test": checks}
    (tmp_path / "idle.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    done = promtool("test", "rules", "idle.yaml", directory=tmp_path)
    found = re.findall(r"^\s*expr: \"(.*?)\", time", done.stdout + done.stderr, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, done.stdout + done.stderr
    assert "* NaN" in found[0], "the one that has to be"
