"""Alerts and dashboard: valid, tested, documented, and about metrics that exist."""

import json
import re
import subprocess
from itertools import chain

import yaml
from prometheus_client.parser import text_string_to_metric_families

from collector.telemetry import Metrics, table
from exporters.metrics_page import FAMILIES, PAGE_FAMILIES, render_metrics, snapshot_families
from exporters.what_if import Advisory, WorkloadProfile
from tests.conftest import find_tool
from tests.support import exporter_cases as cases
from tests.support.manifests import read_yaml
from tests.support.paths import ROOT
from tests.support.processes import output_of

MONITORING = ROOT / "deploy" / "monitoring"
RUNBOOKS = "https://docs.example.com/tracefit/runbooks.md"


RULES = read_yaml(MONITORING / "rules.yaml")["groups"]
ALERTS = {rule["alert"]: rule for group in RULES for rule in group["rules"] if "alert" in rule}
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [(each["name"], each["expr"]) for each in DASHBOARD["annotations"]["list"]]


def known_series():
    """Names that can stand in an expression: ours, the process's, and what the rules record."""
    names = {family.name for family in (*FAMILIES, *PAGE_FAMILIES)}
    for family in FAMILIES:
        suffixes = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}.get(family.kind, ())
        names |= {f"{family.name}_{suffix}" for suffix in suffixes}
    names |= {metric.exposed_name for metric in (*table.TABLE, *table.FLEET_TABLE)}
    return names | {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def series_in(expression):
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:tracefit|process)_[a-z0-9_]+\b", bare))


def test_the_rules_pass_promtool_and_their_own_tests(promtool):
    for arguments in (("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")):
        output_of(promtool, *arguments, cwd=MONITORING)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_stays_quiet():
    tests = read_yaml(MONITORING / "rules_test.yaml")["tests"]
    fires, quiet = set(), set()
    for test in tests:
        for case in test.get("alert_rule_test", ()):
            assert test["input_series"]
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fires == quiet == set(ALERTS)
    assert read_yaml(MONITORING / "prometheusrule.yaml")["spec"]["groups"] == RULES, "of the operator"


def test_every_alert_says_what_it_is_how_grave_and_what_to_do():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == list(ALERTS)
    for name, alert in ALERTS.items():
        assert name.startswith("Tracefit")
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert alert["annotations"]["summary"].endswith(".")
        assert "{{" not in alert["annotations"]["summary"]
        assert "$labels.instance" in alert["annotations"]["description"], name
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"


def test_every_series_in_rules_runbooks_and_dashboard_exists():
    known = known_series()
    for group in RULES:
        for rule in group["rules"]:
            assert series_in(rule["expr"]) <= known, rule
    for title, expression in EXPRESSIONS:
        assert set() < series_in(expression) <= known, title
    for variable in DASHBOARD["templating"]["list"]:
        assert series_in(str(variable["query"])) <= known
    assert series_in((ROOT / "docs" / "runbooks.md").read_text()) <= known


def links(part):
    """Every link of a panel or of the board, wherever Grafana keeps it."""
    if isinstance(part, dict):
        for name, value in part.items():
            if name == "links":
                yield from value
            yield from links(value)
    elif isinstance(part, list):
        for each in part:
            yield from links(each)
            if isinstance(each, dict) and each.get("id") == "links":
                yield from each["value"]


CONFIG = "0f3c52aa9b1e"


MIX = WorkloadProfile(400.0, 247.0, prefix_hit=0.0, concurrency=20.0, running=20.0, itl_us=41e3, ttft_us=310e3)


def an_hour(growth=0):
    """Everything on the pages of a sidecar and of a fleet, as promtool's input; counters grow by so much a minute."""
    targets = {**cases.config().targets, "schedule_time": cases.target("schedule_time")}
    serving = cases.snapshot(cases.config(CONFIG, targets=targets))
    for table_of, job in ((table.TABLE, "tracefit"), (table.FLEET_TABLE, "fleet")):
        own = Metrics(table_of)
        if job == "tracefit":
            own.set(table.CAPACITY_BYTES, 16 * 2**20, "queue")
            own.set(table.CAPACITY_BYTES, 2**28, "memory")
        else:
            own.set(table.FLEET_SOURCES, 3, "merged")
        advisory = Advisory(lambda _: MIX, (50.0,))
        page = render_metrics(
            chain(snapshot_families(serving, advisory, cases.CREATED_UNIX_NANO), own.registry.collect())
        )
        for family in text_string_to_metric_families(page.decode()):
            step = growth if family.type in {"counter", "histogram", "summary"} else 0
            for sample in family.samples:
                theirs = {"exported_instance" if name == "instance" else name: v for name, v in sample.labels.items()}
                labels = {"job": job, "instance": "pod-1:9464", **theirs}
                text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
                yield {"series": f"{sample.name}{{{text}}}", "values": f"{sample.value}+{step}x60"}


def filled_in(expression):
    """An expression of the dashboard with the variables as Grafana fills them in."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m").replace("$__range", "30m"))


def documented_expressions():
    """Of docs/metrics.md, each under a line that says what it is."""
    (block,) = re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    for lines in block.split("\n\n"):
        yield "\n".join(lines.splitlines()[1:]).replace("[1h]", "[30m]")


def failed_expressions(directory, series, checks):
    """Expressions of a promtool test that did not answer as expected."""
    test = {"interval": "1m", "input_series": list(series), "promql_expr_test": checks}
    (directory / "hour.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    command = [find_tool("promtool"), "test", "rules", directory / "hour.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = re.findall(r"^\s*expr: \"(.*?)\", time", said, re.MULTILINE | re.DOTALL)
    assert done.returncode == 0 or found, said
    return found


def test_every_expression_of_dashboard_and_manual_finds_something_while_the_sidecar_works(tmp_path):
    silent = {
        "changes(tracefit_drift_last_timestamp_seconds": "the recorded change of speed is long ago",
        "vllm:num_requests": "a server's own page",
    }
    asked = [*(filled_in(expression) for _, expression in EXPRESSIONS), *documented_expressions()]
    checks = [
        {
            "expr": f"vector(1) and on () ({expression})",
            "eval_time": "50m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for expression in asked
    ]
    found = failed_expressions(tmp_path, an_hour(growth=1), checks)
    assert [expression for expression in found if not any(part in expression for part in silent)] == []
