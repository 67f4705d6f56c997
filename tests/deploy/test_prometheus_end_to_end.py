"""A real Prometheus scrapes a real sidecar under load: coefficients by query, an alert that fires."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress

import pytest
import yaml
from prometheus_client import CollectorRegistry

from exporters.metrics_page import MetricsPage
from exporters.pages import SnapshotDocuments, make_routes
from tests.conftest import find_tool
from tests.support import exporter_cases as cases
from tests.support.clocks import eventually
from tests.support.pages import page_server
from tests.support.paths import ROOT
from tests.support.processes import free_port
from tests.support.sidecars import call_export, running_sidecar
from tests.support.step_exports import make_export

RULES = ROOT / "deploy" / "monitoring" / "rules.yaml"


@contextmanager
def drifting_page():
    """An exporter whose drift counter rises under the scraper's eyes."""
    asked = [0]

    def source():
        asked[0] += 1
        drifted = asked[0] > 2
        targets = {"step_time": cases.target("step_time", drifted=drifted)}
        return cases.snapshot(cases.config(targets=targets), generation=asked[0])

    page = MetricsPage(CollectorRegistry(), source)
    healthy = lambda: (True, {})  # noqa: E731 - a probe
    server = page_server(make_routes(page, SnapshotDocuments(source), alive=healthy, ready=healthy))
    server.start()
    try:
        yield server.port
    finally:
        server.stop()


def impatient_rules():
    """The shipped rules with every waiting time taken out; expressions and texts as they are."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule.pop("for", None)
    return rules


@contextmanager
def prometheus(tmp_path, targets):
    port = free_port()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(impatient_rules()))
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]} for job, target in targets.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": jobs,
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        find_tool("prometheus"),
        f"--config.file={tmp_path / 'prometheus.yaml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            base = f"http://127.0.0.1:{port}"
            eventually(lambda: is_ready(base))
            yield base
        finally:
            process.terminate()


def ask(base, path, **parameters):
    with urllib.request.urlopen(f"{base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=5) as answer:
        return json.load(answer)["data"]


def series_of(base, query):
    return ask(base, "query", query=query)["result"]


def is_ready(base):
    with suppress(OSError), urllib.request.urlopen(f"{base}/-/ready", timeout=5):
        return True


@pytest.mark.timeout(180)
def test_prometheus_scrapes_queries_and_alerts(tmp_path):
    find_tool("prometheus")
    with (
        running_sidecar(tmp_path / "sidecar", JOIN_TIMEOUT_S="1", ALLOWED_LATENESS_S="0") as sidecar,
        drifting_page() as drifting,
        prometheus(tmp_path, {"tracefit": sidecar.http_port, "drifting": drifting}) as base,
    ):
        for first in range(1, 2000, 100):
            call_export(sidecar.grpc_port, make_export(steps_per_span=100, first_step=first).SerializeToString())
        learned = eventually(lambda: series_of(base, 'tracefit_coefficient{job="tracefit",target="step_time"}'))
        published = {
            feature.name: feature.coefficient / 1e6
            for config in sidecar.snapshot().configs
            for feature in config.targets["step_time"].models["portable"].features
        }
        scraped = {row["metric"]["feature"]: float(row["value"][1]) for row in learned}
        assert set(scraped) == set(published)
        buckets = 'tracefit_step_residual_ratio_bucket{job="drifting"}'
        (middle,) = eventually(lambda: series_of(base, f"histogram_quantile(0.5, {buckets})"))
        assert 0.95 < float(middle["value"][1]) <= 1.0  # where 1106 rows of the case have their middle
        up = series_of(base, 'min_over_time(up{job="tracefit"}[5m])')
        assert [row["value"][1] for row in up] == ["1"]
        (alert,) = eventually(
            lambda: [
                found
                for found in ask(base, "alerts")["alerts"]
                if found["labels"]["alertname"] == "TracefitSpeedChanged" and found["state"] == "firing"
            ]
        )
        assert alert["labels"]["job"] == "drifting"
        assert alert["labels"]["severity"] == "warning"
        assert alert["annotations"]["runbook_url"].endswith("#tracefitspeedchanged")
        board = json.loads((ROOT / "deploy" / "monitoring" / "dashboard.json").read_text())
        for target in (target for panel in board["panels"] for target in panel.get("targets", ())):
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$__range", "1m")
            answer = series_of(base, re.sub(r"\$\w+", ".*", expression))
            assert "NaN" not in {row["value"][1] for row in answer}, expression
        targets = ask(base, "targets")["activeTargets"]
        assert {target["health"] for target in targets} == {"up"}
        assert {target["lastError"] for target in targets} == {""}
