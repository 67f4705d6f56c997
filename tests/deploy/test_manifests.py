"""Manifests: they render, they are valid Kubernetes, and what they say agrees with the code."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from collector.app import STOP_TIMEOUT_S
from collector.config.load import load, load_or_degrade
from collector.config.schema import Config
from collector.ingest.forward import FLUSH_S
from collector.service.worker import LAST_BATCH_S
from tests.conftest import find_tool
from tests.support.charts import merged, rendered
from tests.support.command_lines import parsed
from tests.support.manifests import (
    at,
    containers_of,
    environment_of,
    headless,
    kustomize,
    mounts_of,
    of_kind,
    pod_of,
    ports_of,
    read_yaml,
    specs,
    the,
    validate,
)
from tests.support.pages import routes_of
from tests.support.paths import ROOT
from tests.support.processes import output_of

DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
CHART = DEPLOY / "chart"
VALUES = """
scrape: {selector: {app: vllm}}
---
scrape: {enabled: false}
receive: {enabled: true, from: {app: vllm}}
---
scrape: {selector: {app: vllm}}
receive: {enabled: true, tlsSecret: cert, tokenSecret: word}
podMonitor: {enabled: true, labels: {release: kube-prometheus-stack}}
config: {slo: {itl_ms: [30]}}
"""
CHART_VALUES = list(yaml.safe_load_all(VALUES))
STOP_S = STOP_TIMEOUT_S + FLUSH_S + Config.drain_s + LAST_BATCH_S
OLDEST, NEWEST = "1.29", "1.37"
OLDEST_PLAIN = "1.25"

WORKLOAD = """
apiVersion: apps/v1
kind: {kind}
metadata:
  name: engine
  labels: {{app: engine, tracefit: enabled}}
spec:
  {extra}
  selector: {{matchLabels: {{app: engine}}}}
  template:
    metadata: {{labels: {{app: engine}}}}
    spec:
      initContainers: [{{name: download, image: model}}]
      containers: [{{name: engine, image: vllm}}]
      volumes: [{{name: model, emptyDir: {{}}}}]
"""


WAYS = [(kind, way) for kind in ("Deployment", "StatefulSet") for way in ("sidecar", "plain")]


@pytest.fixture(scope="module")
def overlays(tmp_path_factory):
    """An ordinary workload with either component and a claim, by its kind and the way."""
    rendered = {}
    for kind, way in WAYS:
        directory = tmp_path_factory.mktemp(way).resolve()
        extra = "serviceName: engine" if kind == "StatefulSet" else "replicas: 1"
        (directory / "workload.yaml").write_text(WORKLOAD.format(kind=kind, extra=extra))
        paths = [os.path.relpath(KUSTOMIZE / "components" / name, directory) for name in (way, "snapshot-pvc")]
        layers = {"resources": ["workload.yaml"], "components": paths}
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(layers))
        rendered[kind, way] = kustomize(directory)
    return rendered


@pytest.fixture(scope="module")
def renderings(overlays):
    """Everything that can be rendered, once."""
    gateways, overlay = "otel-gateway otel-gateway-tls scrape-gateway", "kustomize/overlays"
    whole = f"{overlay}/example {overlay}/stock-vllm {gateways} fleet/service fleet/cron"
    return [
        *(kustomize(DEPLOY / name) for name in whole.split()),
        *overlays.values(),
        *(rendered(CHART, values) for values in CHART_VALUES),
    ]


@pytest.fixture(scope="module")
def example(renderings):
    """The example overlay."""
    return renderings[0]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_everything_that_renders_is_valid_kubernetes(renderings, version):
    once = {json.dumps(document, sort_keys=True): document for documents in renderings for document in documents}
    kinds = "ConfigMap CronJob Deployment NetworkPolicy PersistentVolumeClaim PodDisruptionBudget Service StatefulSet"
    assert validate(once.values(), version) == {*kinds.split()}


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_either_way_leaves_what_was_there_and_keeps_its_snapshot_in_the_claim(overlays, kind, way):
    """Native where Kubernetes has that, else an ordinary container that waits."""
    documents = overlays[kind, way]
    workload = the(documents, kind)
    labels, spec = pod_of(workload)
    first, ordinary = ([each["name"] for each in spec[part]] for part in ("initContainers", "containers"))
    tracefit = containers_of(workload)["tracefit"]
    if way == "sidecar":
        assert ({*first}, ordinary) == ({"download", "tracefit"}, ["engine"])
        assert tracefit["restartPolicy"] == "Always"
    else:
        assert kind in validate(documents, OLDEST_PLAIN)
        assert (first, {*ordinary}) == (["download"], {"engine", "tracefit"})
        assert "restartPolicy" not in tracefit
        assert at(tracefit, "lifecycle.preStop.exec.command") == ["sleep", "5"]
    assert labels["tracefit"] == "enabled"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes.keys() == {"model", "tracefit-config", "tracefit-snapshot", "tracefit-tmp"}
    (claim,) = specs(documents, "PersistentVolumeClaim")
    assert volumes["tracefit-snapshot"] == {
        "name": "tracefit-snapshot",
        "persistentVolumeClaim": {"claimName": claim},
    }
    assert spec["securityContext"]["fsGroup"] == tracefit["securityContext"]["runAsUser"]


@pytest.fixture(scope="module")
def workloads(renderings):
    """Whatever has a tracefit in it."""
    found = [w for each in renderings for kind in ("Deployment", "StatefulSet") for w in of_kind(each, kind)]
    return [workload for workload in found if "tracefit" in containers_of(workload)]


@pytest.fixture(scope="module")
def pods(workloads):
    """The specifications of their pods."""
    return [pod_of(workload)[1] for workload in workloads]


@pytest.fixture(scope="module")
def containers(workloads):
    """The tracefit of each, and the one of vLLM's own chart."""
    values = read_yaml(DEPLOY / "helm-values" / "vllm-chart.yaml")
    return [*(containers_of(each)["tracefit"] for each in workloads), *values["extraInit"]["initContainers"]]


RESTRICTED = yaml.safe_load("""
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
""")


def test_every_tracefit_container_meets_the_restricted_profile_and_more(containers, pods):
    assert len(containers) == 13
    for container in containers:
        assert container["securityContext"] == RESTRICTED
        assert "cpu" not in container["resources"]["limits"]
        assert set(container["resources"]["requests"]) == {"cpu", "memory", "ephemeral-storage"}
    assert all(spec["enableServiceLinks"] is False for spec in pods), "a service called tracefit sets variables"


def test_probes_ask_pages_that_exist_and_beside_a_vllm_none_holds_its_start_or_takes_its_traffic(workloads, containers):
    routes = set(routes_of(lambda: None))
    gateways = [each["tracefit"] for each in map(containers_of, workloads) if each.keys() == {"tracefit"}]
    assert len(gateways) == 6
    for container in containers:
        assert ports_of(container)["http-metrics"] == int(Config().pages.rpartition(":")[2])
        probes = {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys()
        assert container in gateways or probes == {"livenessProbe"}
        assert at(container, "livenessProbe.httpGet.path") == "/healthz"
        for asked in (container[probe]["httpGet"] for probe in probes):
            assert (asked["path"] in routes, asked["port"]) == (True, "http-metrics")


def written_mib(configurations):
    """A whole log and two checkpoints of so many configurations, of 1 MiB at most for each (docs/reliability.md)."""
    config = Config()
    return config.log_capacity_mib * 33 // 32 + 2 * configurations


def test_no_volume_is_outgrown_by_a_whole_log_and_two_checkpoints_of_all_configurations(renderings, pods):
    volumes = [v for spec in pods for v in spec["volumes"] if v["name"] == "tracefit-snapshot"]
    limits = [v["emptyDir"]["sizeLimit"] for v in volumes if "emptyDir" in v]
    assert min(int(limit.removesuffix("Mi")) for limit in limits) >= written_mib(1), (
        "the pod of a vLLM would be evicted"
    )
    claims = [claim for documents in renderings for claim in of_kind(documents, "PersistentVolumeClaim")]
    for documents in renderings:
        claims += [c for spec in specs(documents, "StatefulSet").values() for c in spec.get("volumeClaimTemplates", ())]
    sizes = {each["metadata"]["name"]: at(each, "spec.resources.requests.storage") for each in claims}
    assert sizes.keys() == {"snapshot", "tracefit-snapshot", "tracefit-fleet"}
    for size in sizes.values():
        usable_mib = 0.9 * 1024 * int(size.removesuffix("Gi"))
        assert usable_mib >= written_mib(Config().engines_max), "a file system takes some of it for itself"


def test_what_the_manifests_configure_is_accepted_and_a_missing_file_keeps_no_pod_from_starting(
    containers, pods, tmp_path
):
    load(KUSTOMIZE / "base" / "tracefit.yaml", {})
    assert min(spec.get("terminationGracePeriodSeconds", 30) for spec in pods) > STOP_S
    seen = set()
    for container in containers:
        environment = environment_of(container, "TRACEFIT_")
        seen |= set(environment)
        without_file, problem = load_or_degrade(tmp_path / "missing.yaml", environment)
        assert problem
        assert environment.pop("TRACEFIT_CONFIG", None) in {None, "/etc/tracefit/tracefit.yaml"}
        mounts = mounts_of(container) | {"/dev/shm"}
        for each in (without_file, load(None, environment)):
            assert any(Path(each.directory).is_relative_to(mount) for mount in mounts)
    for spec in pods:
        assert all(v["configMap"].get("optional") for v in spec["volumes"] if v["name"] == "tracefit-config")
    files = "TLS_CERT_FILE TLS_CLIENT_CA_FILE TLS_KEY_FILE TOKEN_FILE"
    names = f"CONFIG ON_ERROR DIRECTORY DISCOVER FPM PAGES LISTEN SCRAPE {files}".split()
    assert seen == {f"TRACEFIT_{name}" for name in names}


def test_vllm_is_told_where_to_send_in_every_example(example):
    engine = containers_of(the(example, "Deployment"))["vllm"]
    chart = read_yaml(DEPLOY / "helm-values" / "vllm-chart.yaml")["image"]
    stack = read_yaml(DEPLOY / "helm-values" / "production-stack.yaml")
    (model,) = stack["servingEngineSpec"]["modelSpec"]
    told = [(engine["args"], engine), (chart["command"], chart), (model["vllmConfig"]["extraArgs"], model)]
    port = Config().listen.rpartition(":")[2]
    for arguments, container in told:
        values = environment_of(container)
        assert f"--otlp-traces-endpoint=http://127.0.0.1:{port}" in arguments
        assert values["OTEL_SPAN_EVENT_COUNT_LIMIT"] == "20000"
        assert "vllm.model=" in values["OTEL_RESOURCE_ATTRIBUTES"]


def test_a_stock_vllm_gets_the_plugin_where_python_looks_and_sends_to_the_sidecar_beside_it(workloads):
    (workload,) = [each for each in workloads if "tracefit-plugin" in containers_of(each)]
    containers = containers_of(workload)
    assert [c["name"] for c in pod_of(workload)[1]["containers"]] == ["vllm"]
    engine, copying, sidecar = (containers[name] for name in ("vllm", "tracefit-plugin", "tracefit"))
    assert copying["image"] == sidecar["image"]
    assert copying["command"] == ["cp", "-r", "/opt/tracefit-vllm/.", "/plugin/"]
    assert [m["name"] for m in copying["volumeMounts"] if m["mountPath"] == "/plugin"] == ["tracefit-plugin"]
    (mount,) = [m for m in engine["volumeMounts"] if m["name"] == "tracefit-plugin"]
    told = environment_of(engine)
    assert told["PYTHONPATH"] == mount["mountPath"]
    assert "--scheduler-cls=tracefit_vllm.TracedScheduler" in engine["args"]
    heard = environment_of(sidecar)["TRACEFIT_FPM"]
    assert told["TRACEFITVLLM_ENDPOINT"] == heard == "tcp://127.0.0.1:20380"
    assert copying["securityContext"] == sidecar["securityContext"]
    assert "/opt/tracefit-vllm" in (ROOT / "Dockerfile").read_text()


def test_monitoring_finds_the_pods_and_their_port_which_is_open_and_never_the_receiver(example):
    monitor, policy = the(example, "PodMonitor")["spec"], the(example, "NetworkPolicy")["spec"]
    workload = the(example, "Deployment")
    labels, _ = pod_of(workload)
    for selector in (monitor["selector"], policy["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in ports_of(containers_of(workload)["tracefit"])
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == {9464, 8000}
    assert policy["policyTypes"] == ["Ingress"]
    (dashboard,) = [c for c in of_kind(example, "ConfigMap") if c["metadata"].get("labels")]
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert dashboard["data"]["tracefit.json"] == (DEPLOY / "monitoring" / "dashboard.json").read_text()


@pytest.fixture(scope="module")
def gateway():
    """Tracefits behind a Collector."""
    return kustomize(DEPLOY / "otel-gateway")


def test_the_gateway_keeps_one_pod_with_one_tracefit(gateway):
    config = read_yaml(DEPLOY / "otel-gateway" / "collector-config.yaml")
    balancing = config["exporters"]["loadbalancing"]
    assert balancing["routing_key"] == "service"
    name, service = headless(gateway)
    found = balancing["resolver"]["dns"]
    assert (found["hostname"], found["port"] in {port["port"] for port in service["ports"]}) == (name, True)
    assert service["selector"].items() <= pod_of(the(gateway, "StatefulSet"))[0].items()
    assert "batch" not in at(config, "service.pipelines.traces").get("processors", [])
    assert at(config, "receivers.otlp.protocols.grpc.max_recv_msg_size_mib") == Config().message_max_mib


def test_nobody_but_the_collector_reaches_the_receivers_behind_the_gateway(gateway):
    policies, collector = specs(gateway, "NetworkPolicy"), the(gateway, "Deployment")
    receiver = {"protocol": "TCP", "port": 4317}
    (senders,) = [rule["from"] for rule in policies["tracefit"]["ingress"] if receiver in rule["ports"]]
    assert senders == [{"podSelector": {"matchLabels": at(collector, "spec.selector.matchLabels")}}]
    assert [rule["from"] for rule in policies["otel-gateway"]["ingress"]] == [[{"podSelector": {}}]], "this namespace"
    (container,) = containers_of(collector).values()
    config = yaml.safe_load(of_kind(gateway, "ConfigMap")[0]["data"]["config.yaml"])
    assert config["service"]["extensions"] == ["health_check"]
    assert at(config, "extensions.health_check.endpoint").endswith(f":{ports_of(container)['health']}")
    assert specs(gateway, "PodDisruptionBudget").keys() == policies.keys()


def test_with_tls_the_collector_merges_what_it_is_given_and_trusts_the_name_in_the_certificate():
    documents = kustomize(DEPLOY / "otel-gateway-tls")
    container = containers_of(the(documents, "Deployment"))["collector"]
    (files,) = [c["data"] for c in of_kind(documents, "ConfigMap") if "tls.yaml" in c["data"]]
    named = [argument.removeprefix("--config=/etc/otelcol/") for argument in container["args"]]
    config = {}
    for name in named:
        config = merged(config, yaml.safe_load(files[name]))
    assert named == ["config.yaml", "tls.yaml"]
    balancing = config["exporters"]["loadbalancing"]
    assert balancing["routing_key"] == "service"
    tls = at(balancing, "protocol.otlp.tls")
    assert tls["server_name_override"] == headless(documents)[0]
    assert tls["insecure"] is False
    for each in (at(config, "receivers.otlp.protocols.grpc.tls"), tls):
        assert {str(Path(path).parent) for key, path in each.items() if key.endswith("_file")} <= mounts_of(container)


def test_the_scraping_gateway_asks_every_pod_behind_its_headless_service():
    documents = kustomize(DEPLOY / "scrape-gateway")
    name, service = headless(documents)
    target = f"dns+http://{name}:{service['ports'][0]['port']}/metrics"
    assert load(DEPLOY / "scrape-gateway" / "config.yaml", {}).scrape == (target,)
    gateway = the(documents, "StatefulSet")
    assert gateway["spec"]["replicas"] == 1
    (pages,) = [spec for spec in specs(documents, "Service").values() if spec is not service]
    assert pages["selector"].items() <= pod_of(gateway)[0].items()
    assert set(the(documents, "ConfigMap")["data"]) == {"tracefit.yaml"}


@pytest.mark.parametrize(("way", "kind"), [("service", "Deployment"), ("cron", "CronJob")])
def test_the_fleet_asks_every_sidecar_by_arguments_that_the_command_takes(way, kind):
    documents = kustomize(DEPLOY / "fleet" / way)
    workload = the(documents, kind)
    alone = workload["spec"].get("strategy", {}).get("type") or workload["spec"]["concurrencyPolicy"]
    assert alone == {"service": "Recreate", "cron": "Forbid"}[way]
    workload = workload["spec"].get("jobTemplate", workload)
    name, service = headless(documents)
    assert service["selector"] == {"tracefit": "enabled"}
    assert "tracefit" not in pod_of(workload)[0], "it would ask itself"
    container = containers_of(workload)["tracefit-fleet"]
    given = parsed(container["args"])
    assert given.sources == (f"dns+http://{name}:{service['ports'][0]['port']}",)
    assert (given.every is not None) == (way == "service")
    assert str(given.out) in mounts_of(container)
    assert container["securityContext"] == RESTRICTED


def test_the_replay_on_ray_runs_one_image_everywhere_and_arguments_that_the_command_takes():
    documents = kustomize(DEPLOY / "fleet" / "ray")
    job = the(documents, "RayJob")["spec"]
    cluster = job["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"], workers["template"], job["submitterPodTemplate"]]
    containers = [pod["spec"]["containers"][0] for pod in pods]
    assert {container["image"] for container in containers} == {"registry.example.com/tracefit:0.1.0-fleet"}
    assert "EXTRAS=kv,fleet" in (ROOT / "Dockerfile").read_text()
    for pod, container in zip(pods, containers, strict=True):
        # KubeRay's own kind is in no schema of Kubernetes, its pods are
        wrapped = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}
        assert validate([wrapped], NEWEST) == {"Pod"}
        assert container["securityContext"] == RESTRICTED
        assert "/tmp" in mounts_of(container)
    command, *arguments = job["entrypoint"].split()
    given = parsed(arguments)
    assert (command, given.ray) == ("tracefit", "auto")
    assert str(given.out) in mounts_of(containers[0])
    (claim,) = specs(documents, "PersistentVolumeClaim")
    volumes = {volume["name"]: volume for volume in pods[0]["spec"]["volumes"]}
    assert at(volumes, "fleet.persistentVolumeClaim.claimName") == claim


@pytest.mark.parametrize("document", ["README.md", "docs/deploy.md"])
def test_the_first_steps_of_the_documents_work_as_they_are_written(tmp_path, document):
    find_tool("kubectl")
    guide = (ROOT / document).read_text()
    (commands,) = re.findall(r"<!-- try -->\n```sh\n(.*?)```", guide, re.DOTALL)
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    # `make validate` would build an environment of its own: its recipe is compared, and its work done, below.
    steps = [line for line in commands.splitlines() if not line.startswith("make validate FILE=mine.yaml")]
    assert len(steps) == len(commands.splitlines()) - 1
    assert "\n\t@$(BIN)/kubernetes-validate --strict $(FILE)\n" in (ROOT / "Makefile").read_text()
    output_of("bash", "-euc", "\n".join(steps), cwd=tmp_path)
    documents = list(yaml.safe_load_all((tmp_path / "mine.yaml").read_text()))
    assert "tracefit" in containers_of(of_kind(documents, "Deployment")[0])
    assert validate(documents, NEWEST) == {"ConfigMap", "Deployment", "NetworkPolicy"}


def test_the_guide_lists_every_component_and_has_the_numbers_of_the_manifests(containers):
    text = (ROOT / "docs" / "deploy.md").read_text()
    components = {path.name for path in (KUSTOMIZE / "components").iterdir()}
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == components
    guide = " ".join(text.split())
    requests, limits = (containers[0]["resources"][name] for name in ("requests", "limits"))
    assert f"asks for {requests['cpu']} CPU and {requests['memory']}" in guide
    assert f"may use {limits['memory']}" in guide
    assert f"stopped last and needs up to {STOP_S:.0f} s" in guide
    vllm = [path.read_text() for path in KUSTOMIZE.glob("overlays/*/vllm.yaml")]
    assert all(f"the sidecar's {STOP_S:.0f} s at most" in text for text in vllm if "the sidecar's" in text)
