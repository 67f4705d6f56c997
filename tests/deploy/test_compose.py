"""compose.yaml: what it mounts exists, what it runs is accepted, and Prometheus takes its configuration."""

import shutil

import pytest

from collector.config.load import load
from tests.support.command_lines import parsed
from tests.support.manifests import at, read_yaml
from tests.support.paths import ROOT
from tests.support.processes import output_of

COMPOSE = read_yaml(ROOT / "compose.yaml")
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name):
    for volume in SERVICES[name].get("volumes", ()):
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (ROOT / source).exists()


def test_what_our_containers_run_and_how_they_are_configured_is_accepted():
    ours = [service for service in SERVICES.values() if service["image"].startswith("tracefit:")]
    assert len(ours) == 2
    for service in ours:
        parsed(service["command"])
        load(None, service.get("environment", {}))


def test_the_recorded_server_sends_where_the_sidecar_listens():
    given = parsed(SERVICES["server"]["command"])
    host, _, port = given.to.partition(":")
    endpoint = SERVICES[host]["environment"]["TRACEFIT_LISTEN"]
    assert endpoint == f"0.0.0.0:{port}"
    assert at(SERVICES, "server.healthcheck.disable"), "it has no pages that the image's check could ask for"


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
