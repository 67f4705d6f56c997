"""The chart: what it renders is what helm renders, on every Kubernetes it claims, and a wrong value is refused."""

from __future__ import annotations

import json
import shutil
import subprocess

import jsonschema
import pytest
import yaml

import collector
from collector.config import load
from tests.deploy.test_manifests import CHART, CHART_VALUES, NEWEST
from tests.support.charts import ChartError, merged, rendered
from tests.support.manifests import containers_of, of_kind, validate

SCRAPING, RECEIVING, BOTH = CHART_VALUES
OTHER = {
    "scrape": {"selector": {"app": "vllm"}},
    "image": {"tag": "9.9.9", "pullSecrets": [{"name": "key"}]},
    "persistence": {"storageClass": "fast"},
    "networkPolicy": {"enabled": False},
    "podLabels": {"team": "serving"},
    "podAnnotations": {"note": "1"},
    "nodeSelector": {"kind": "cpu"},
    "tolerations": [{"operator": "Exists"}],
}
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def in_order(documents):
    return sorted(documents, key=lambda each: (each["kind"], each["metadata"]["name"]))


@pytest.mark.parametrize("values", [SCRAPING, RECEIVING, BOTH, OTHER], ids=["scraping", "receiving", "both", "other"])
def test_helm_renders_what_the_other_tests_look_at(tmp_path, values):
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed; the few words of its templates that the chart has are rendered without it")
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [
            helm,
            "template",
            "gate",
            str(CHART),
            "-n",
            "llm",
            "-f",
            str(tmp_path / "values.yaml"),
            "--kube-version",
            NEWEST,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert in_order(theirs) == in_order(rendered(CHART, values))


@pytest.mark.parametrize("values", [SCRAPING, RECEIVING, BOTH, OTHER], ids=["scraping", "receiving", "both", "other"])
def test_it_is_valid_on_the_oldest_kubernetes_it_claims(values):
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    oldest = about["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    assert "StatefulSet" in validate(rendered(CHART, values), oldest)
    assert (about["version"], about["appVersion"]) == (collector.__version__, collector.__version__)


@pytest.mark.parametrize("release", ["gate", "other"])
def test_its_services_and_policies_find_its_own_pod_and_nothing_of_another_release(release):
    documents = rendered(CHART, BOTH, release)
    (workload,) = of_kind(documents, "StatefulSet")
    labels = workload["spec"]["template"]["metadata"]["labels"]
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    assert labels["app.kubernetes.io/instance"] == release
    chosen = [
        services[release]["selector"],
        workload["spec"]["selector"]["matchLabels"],
        *(each["spec"]["podSelector"]["matchLabels"] for each in of_kind(documents, "NetworkPolicy")),
        *(each["spec"]["selector"]["matchLabels"] for each in of_kind(documents, "PodDisruptionBudget")),
        *(each["spec"]["selector"]["matchLabels"] for each in of_kind(documents, "PodMonitor")),
    ]
    assert len(chosen) == 5
    for selector in chosen:
        assert selector.items() <= labels.items()
        assert selector["app.kubernetes.io/instance"] == release
    container = containers_of(workload)["tracefit"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in services[release]["ports"]} == ports
    settings = {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("TRACEFIT_")}
    settings.pop("TRACEFIT_CONFIG")
    (target,) = load(None, settings).scrape
    assert target == f"dns+http://{release}-vllm:{services[f'{release}-vllm']['ports'][0]['port']}/metrics"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(path.rpartition("/")[0] in mounted for name, path in settings.items() if name.endswith("_FILE"))


def test_only_the_pods_that_are_named_may_send():
    (policy,) = of_kind(rendered(CHART, RECEIVING), "NetworkPolicy")
    (senders,) = [rule["from"] for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 4317]
    assert senders == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    (policy,) = of_kind(rendered(CHART, SCRAPING), "NetworkPolicy")
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]] == [9464]


def test_further_keys_reach_the_file_and_another_file_rolls_the_pod():
    def file_and_mark(values):
        documents = rendered(CHART, values)
        (file,) = of_kind(documents, "ConfigMap")
        (workload,) = of_kind(documents, "StatefulSet")
        return file["data"]["tracefit.yaml"], workload["spec"]["template"]["metadata"]["annotations"][
            "tracefit.io/config"
        ]

    empty, with_target = file_and_mark(SCRAPING), file_and_mark(BOTH)
    assert yaml.safe_load(with_target[0]) == BOTH["config"]
    assert not yaml.safe_load(empty[0])
    assert empty[1] != with_target[1]


@pytest.mark.parametrize(
    ("values", "word"),
    [({}, "scrape.selector"), ({"scrape": {"enabled": False}}, "nothing would be learned")],
)
def test_a_chart_that_would_learn_nothing_is_not_installed(values, word):
    with pytest.raises(ChartError, match=word):
        rendered(CHART, values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scarpe": {}},
        {"scrape": None},
        {"scrape": {"prot": 8000}},
        {"scrape": {"port": "8000"}},
        {"scrape": {"selector": "app=vllm"}},
        {"receive": {"enabled": "yes"}},
        {"image": {"pullPolicy": "always", "repository": "x"}},
        {"podMonitor": {"labels": {"release": 1}}},
        {"config": []},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(DEFAULTS, wrong), SCHEMA)


def test_every_value_of_the_chart_is_in_its_schema():
    jsonschema.validate(DEFAULTS, SCHEMA)
    assert set(DEFAULTS) | {"global"} == set(SCHEMA["properties"])
    for name, section in SCHEMA["properties"].items():
        assert set(section.get("properties", ())) == set(DEFAULTS[name] if "properties" in section else ())
