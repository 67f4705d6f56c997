"""A real Prometheus scrapes a real sidecar under load, evaluates the shipped rules, and finds the coefficients."""

import json
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress

import pytest
import yaml

from tests.conftest import find_tool
from tests.support.clocks import eventually
from tests.support.paths import ROOT
from tests.support.processes import free_port
from tests.support.sidecars import call_export, running_sidecar
from tests.support.step_exports import make_export


@contextmanager
def prometheus(directory, target):
    """The address of one that scrapes a port every second, with the shipped rules."""
    base = f"127.0.0.1:{free_port()}"
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(ROOT / "deploy" / "monitoring" / "rules.yaml")],
        "scrape_configs": [{"job_name": "tracefit", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        find_tool("prometheus"),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={base}",
        "--log.level=error",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield base
        finally:
            process.terminate()


def ask(base, path, **parameters):
    """What it answers; None before it does."""
    address = f"http://{base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
        return json.load(answer)["data"]


@pytest.mark.timeout(180)
def test_prometheus_scrapes_and_finds_the_coefficients(tmp_path):
    find_tool("prometheus")
    with (
        running_sidecar(tmp_path / "sidecar", JOIN_TIMEOUT_S="1", ALLOWED_LATENESS_S="0") as sidecar,
        prometheus(tmp_path, sidecar.http_port) as base,
    ):
        for first in range(1, 2000, 100):
            call_export(sidecar.grpc_port, make_export(steps_per_span=100, first_step=first).SerializeToString())
        query = 'tracefit_coefficient{target="step_time"}'
        learned = eventually(lambda: (ask(base, "query", query=query) or {"result": []})["result"])
        scraped = {row["metric"]["feature"] for row in learned}
        assert scraped == {
            feature.name
            for config in sidecar.snapshot().configs
            for feature in config.targets["step_time"].models["portable"].features
        }
        (target,) = ask(base, "targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        rules = eventually(
            lambda: [
                rule for group in ask(base, "rules")["groups"] for rule in group["rules"] if rule["health"] != "unknown"
            ]
        )
        assert {rule["health"] for rule in rules} == {"ok"}
