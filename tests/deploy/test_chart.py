"""The chart: what it renders is what helm renders, on every Kubernetes it claims, and a wrong value is refused."""

import json
import shutil

import jsonschema
import pytest
import yaml

import collector
from collector.config import load
from tests.deploy.test_manifests import CHART, CHART_VALUES, NEWEST
from tests.support.charts import ChartError, merged, rendered
from tests.support.manifests import (
    at,
    containers_of,
    environment_of,
    mounts_of,
    pod_of,
    read_yaml,
    specs,
    the,
    validate,
)
from tests.support.processes import output_of

SCRAPING, RECEIVING, BOTH = CHART_VALUES
OTHER = yaml.safe_load("""
scrape: {selector: {app: vllm}}
image: {tag: 9.9.9, pullSecrets: [{name: key}]}
persistence: {storageClass: fast}
networkPolicy: {enabled: false}
podLabels: {team: serving}
podAnnotations: {note: "1"}
nodeSelector: {kind: cpu}
tolerations: [{operator: Exists}]
""")
EVERY_WAY = pytest.mark.parametrize(
    "values", [SCRAPING, RECEIVING, BOTH, OTHER], ids=["scraping", "receiving", "both", "other"]
)
DEFAULTS = read_yaml(CHART / "values.yaml")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def in_order(documents):
    return sorted(documents, key=lambda each: (each["kind"], each["metadata"]["name"]))


@EVERY_WAY
def test_helm_renders_what_the_other_tests_look_at(tmp_path, values):
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed; the few words of its templates that the chart has are rendered without it")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    command = f"{helm} template gate {CHART} -n llm -f {tmp_path}/values.yaml --kube-version {NEWEST}"
    theirs = [document for document in yaml.safe_load_all(output_of(*command.split())) if document]
    assert in_order(theirs) == in_order(rendered(CHART, values))


@EVERY_WAY
def test_it_is_valid_on_the_oldest_kubernetes_it_claims(values):
    about = read_yaml(CHART / "Chart.yaml")
    oldest = about["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    assert "StatefulSet" in validate(rendered(CHART, values), oldest)
    assert (about["version"], about["appVersion"]) == (collector.__version__, collector.__version__)


@pytest.mark.parametrize("release", ["gate", "other"])
def test_its_services_and_policies_find_its_own_pod_and_nothing_of_another_release(release):
    documents = rendered(CHART, BOTH, release)
    workload = the(documents, "StatefulSet")
    labels, _ = pod_of(workload)
    services = specs(documents, "Service")
    assert labels["app.kubernetes.io/instance"] == release
    chosen = [services[release]["selector"], at(the(documents, "NetworkPolicy"), "spec.podSelector.matchLabels")]
    kinds = ("StatefulSet", "PodDisruptionBudget", "PodMonitor")
    chosen += [at(the(documents, kind), "spec.selector.matchLabels") for kind in kinds]
    for selector in chosen:
        assert selector.items() <= labels.items()
        assert selector["app.kubernetes.io/instance"] == release
    container = containers_of(workload)["tracefit"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in services[release]["ports"]} == ports
    settings = environment_of(container, "TRACEFIT_")
    settings.pop("TRACEFIT_CONFIG")
    (target,) = load(None, settings).scrape
    assert target == f"dns+http://{release}-vllm:{services[f'{release}-vllm']['ports'][0]['port']}/metrics"
    assert all(
        path.rpartition("/")[0] in mounts_of(container) for name, path in settings.items() if name.endswith("_FILE")
    )


def test_only_the_pods_that_are_named_may_send():
    receiving, scraping = (
        {rule["ports"][0]["port"]: rule.get("from") for rule in the(documents, "NetworkPolicy")["spec"]["ingress"]}
        for documents in (rendered(CHART, RECEIVING), rendered(CHART, SCRAPING))
    )
    assert receiving[4317] == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    assert scraping.keys() == {9464}


def test_further_keys_reach_the_file_and_another_file_rolls_the_pod():
    def file_and_mark(values):
        documents = rendered(CHART, values)
        template = the(documents, "StatefulSet")["spec"]["template"]
        file = yaml.safe_load(the(documents, "ConfigMap")["data"]["tracefit.yaml"])
        return file, template["metadata"]["annotations"]["tracefit.io/config"]

    (empty, mark), (with_target, another_mark) = file_and_mark(SCRAPING), file_and_mark(BOTH)
    assert with_target == BOTH["config"]
    assert not empty
    assert mark != another_mark


@pytest.mark.parametrize(
    ("values", "word"),
    [({}, "scrape.selector"), ({"scrape": {"enabled": False}}, "nothing would be learned")],
)
def test_a_chart_that_would_learn_nothing_is_not_installed(values, word):
    with pytest.raises(ChartError, match=word):
        rendered(CHART, values)


WRONG = """
scarpe: {}
scrape:
scrape: {prot: 8000}
scrape: {port: "8000"}
scrape: {selector: app=vllm}
receive: {enabled: "yes"}
image: {pullPolicy: always, repository: x}
podMonitor: {labels: {release: 1}}
config: []
"""


@pytest.mark.parametrize("wrong", WRONG.strip().splitlines())
def test_a_wrong_value_is_refused(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(DEFAULTS, yaml.safe_load(wrong)), SCHEMA)


def test_every_value_of_the_chart_is_in_its_schema():
    jsonschema.validate(DEFAULTS, SCHEMA)
    assert set(DEFAULTS) | {"global"} == set(SCHEMA["properties"])
    for name, section in SCHEMA["properties"].items():
        assert set(section.get("properties", ())) == set(DEFAULTS[name] if "properties" in section else ())
