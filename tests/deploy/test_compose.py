"""compose.yaml: what it mounts exists, what it runs is accepted, and Prometheus takes its configuration."""

import shutil

from collector.config.load import load
from tests.support.command_lines import parsed
from tests.support.manifests import read_yaml
from tests.support.paths import ROOT
from tests.support.processes import output_of

COMPOSE = read_yaml(ROOT / "compose.yaml")
SERVICES = COMPOSE["services"]


def test_what_our_container_runs_and_how_it_is_configured_is_accepted():
    parsed(SERVICES["tracefit"]["command"])
    load(None, SERVICES["tracefit"]["environment"])


def test_prometheus_takes_its_configuration(tmp_path, promtool):
    shutil.copy(ROOT / "deploy" / "compose" / "prometheus.yaml", tmp_path / "prometheus.yml")
    shutil.copy(ROOT / "deploy" / "monitoring" / "rules.yaml", tmp_path / "rules.yaml")
    output_of(promtool, "check", "config", tmp_path / "prometheus.yml")
    (scraped,) = read_yaml(tmp_path / "prometheus.yml")["scrape_configs"][0]["static_configs"]
    assert scraped["targets"] == ["tracefit:9464"]
    opened = f"127.0.0.1:{scraped['labels']['instance'].rpartition(':')[2]}:9464"
    assert opened in SERVICES["tracefit"]["ports"], "the dashboard's links lead to the instance"
