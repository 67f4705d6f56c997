"""compose.yaml: what it mounts exists, what it runs is accepted, and Prometheus takes its configuration."""

import shutil

import pytest

from collector.config.load import load
from tests.support.command_lines import parsed
from tests.support.manifests import read_yaml
from tests.support.paths import ROOT
from tests.support.processes import output_of

COMPOSE = read_yaml(ROOT / "compose.yaml")
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name):
    for volume in SERVICES[name].get("volumes", ()):
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (ROOT / source).exists()


def test_what_our_container_runs_and_how_it_is_configured_is_accepted():
    parsed(SERVICES["tracefit"]["command"])
    load(None, SERVICES["tracefit"]["environment"])


def test_every_port_is_open_on_this_machine_only():
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_prometheus_takes_its_configuration(tmp_path, promtool):
    shutil.copy(ROOT / "deploy" / "compose" / "prometheus.yaml", tmp_path / "prometheus.yml")
    shutil.copy(ROOT / "deploy" / "monitoring" / "rules.yaml", tmp_path / "rules.yaml")
    output_of(promtool, "check", "config", tmp_path / "prometheus.yml")
    (scraped,) = read_yaml(tmp_path / "prometheus.yml")["scrape_configs"][0]["static_configs"]
    assert scraped["targets"] == ["tracefit:9464"]
    opened = f"127.0.0.1:{scraped['labels']['instance'].rpartition(':')[2]}:9464"
    assert opened in SERVICES["tracefit"]["ports"], "the dashboard's links lead to the instance"


def test_grafana_finds_the_dashboard_and_its_data():
    provisioning = ROOT / "deploy" / "compose" / "grafana" / "provisioning"
    (source,) = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"]
    (provider,) = read_yaml(provisioning / "dashboards" / "tracefit.yaml")["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"]) and path.endswith("dashboard.json") for path in mounted)
