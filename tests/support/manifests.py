"""Manifests for tests: rendered by kustomize, held against the schemas of Kubernetes, taken apart."""

import importlib
import importlib.util
import os
from functools import cache

import pytest
import yaml

from tests.conftest import find_tool
from tests.support.processes import output_of

OPERATOR_KINDS = {"PodMonitor", "PrometheusRule"}


@cache
def _rendered(directory):
    return output_of(find_tool("kubectl"), "kustomize", directory)


def kustomize(directory):
    return list(yaml.safe_load_all(_rendered(directory)))


def find_validator():
    """The Python package with the Kubernetes schemas; without it a skip, or a failure where tools are required."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        complain = pytest.fail if os.environ.get("TOOLS_REQUIRED") == "1" else pytest.skip
        complain("kubernetes-validate is not installed (pip install kubernetes-validate)")
    return importlib.import_module("kubernetes_validate")


def validate(documents, version):
    """Validate against the schemas of one Kubernetes version; returns the kinds that were validated."""
    validator = find_validator()
    validated = set()
    for document in documents:
        if document["kind"] in OPERATOR_KINDS:
            continue
        validator.validate(document, version, strict=True)
        validated.add(document["kind"])
    return validated


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def the(documents, kind):
    """The only one of its kind."""
    (one,) = of_kind(documents, kind)
    return one


def specs(documents, kind):
    """By name."""
    return {document["metadata"]["name"]: document["spec"] for document in of_kind(documents, kind)}


def headless(documents):
    """Name and specification of the service that names pods."""
    (one,) = [each for each in specs(documents, "Service").items() if each[1].get("clusterIP") == "None"]
    return one


def pod_of(workload):
    """Labels and specification of its pods."""
    template = workload["spec"]["template"]
    return template["metadata"].get("labels", {}), template["spec"]


def containers_of(workload):
    _, spec = pod_of(workload)
    return {c["name"]: c for c in (*spec.get("initContainers", ()), *spec["containers"])}


def environment_of(container, prefix=""):
    """Values by name, of the names that begin so."""
    return {each["name"]: each.get("value") for each in container["env"] if each["name"].startswith(prefix)}


def mounts_of(container):
    """Paths."""
    return {mount["mountPath"] for mount in container.get("volumeMounts", ())}


def ports_of(container):
    """Numbers by name."""
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def at(tree, path):
    """What is at ``spec.template.metadata``."""
    for key in path.split("."):
        tree = tree[key]
    return tree
