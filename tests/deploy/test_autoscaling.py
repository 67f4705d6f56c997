"""The autoscaling example: valid Kubernetes, valid PromQL about metrics that exist, and the replicas it leads to."""

import re

import pytest
import yaml

from collector.config.load import load
from exporters.metrics_page import FAMILIES
from tests.deploy.test_manifests import DEPLOY, NEWEST, OLDEST
from tests.support.manifests import at, find_validator, read_yaml
from tests.support.processes import output_of

AUTOSCALING = DEPLOY / "autoscaling"
HPA, KEDA, ADAPTER = (read_yaml(AUTOSCALING / name) for name in ("hpa.yaml", "keda.yaml", "adapter-values.yaml"))
(RULE,) = ADAPTER["rules"]["custom"]
(TRIGGER,) = KEDA["spec"]["triggers"]
BY_THE_ADAPTER = (
    RULE["metricsQuery"]
    .replace("<<.GroupBy>>", "pod")
    .replace("<<.LabelMatchers>>", 'namespace="llm",pod=~"llama-2-7b-0"')
)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_autoscaler_is_valid(version):
    find_validator().validate(HPA, version, strict=True)


def test_both_scale_the_deployment_of_the_example():
    (example,) = (
        each
        for each in yaml.safe_load_all((DEPLOY / "kustomize/overlays/example/vllm.yaml").read_text())
        if each["kind"] == at(HPA, "spec.scaleTargetRef.kind")
    )
    names = {at(each, "spec.scaleTargetRef.name") for each in (HPA, KEDA)}
    assert names == {example["metadata"]["name"]}


def test_what_the_autoscaler_asks_for_is_what_the_adapter_gives():
    (metric,) = HPA["spec"]["metrics"]
    assert at(metric, "pods.metric.name") == RULE["name"]["as"]
    share = float(at(metric, "pods.target.averageValue").removesuffix("m")) / 1000
    assert share == float(TRIGGER["metadata"]["threshold"])


def test_its_metrics_and_labels_exist_for_the_target_it_names(tmp_path):
    labels = {family.name: family.labels for family in FAMILIES}
    queries = (RULE["seriesQuery"], RULE["metricsQuery"], TRIGGER["metadata"]["query"])
    for query in queries:
        assert set(re.findall(r"tracefit_\w+", query)) <= set(labels)
        assert "itl" in labels["tracefit_slo_concurrency_safe"]
    (target_ms,) = {float(each) * 1e3 for query in queries for each in re.findall(r'itl="([\d.]+)"', query)}
    written = re.search(r"itl_ms: (\[\d+\])", (AUTOSCALING / "hpa.yaml").read_text())[1]
    (tmp_path / "tracefit.yaml").write_text(f"itl_ms: {written}")
    assert load(tmp_path / "tracefit.yaml", {}).itl_ms == (target_ms,)


LOADS = """
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'vllm:num_requests_running{namespace="llm",pod="llama-2-7b-0",job="vllm"}', values: "30 30 0"}
      - {series: 'vllm:num_requests_waiting{namespace="llm",pod="llama-2-7b-0",job="vllm"}', values: "10 10 0"}
      - {series: 'vllm:num_requests_running{namespace="llm",pod="llama-2-7b-1",job="vllm"}', values: "8 8 20"}
      - {series: 'vllm:num_requests_running{namespace="llm",pod="other-0",job="vllm"}', values: "99 99 99"}
      - series: 'tracefit_slo_concurrency_safe{namespace="llm",pod="llama-2-7b-0",job="t",itl="0.03"}'
        values: "_ 20 20"
      - series: 'tracefit_slo_concurrency_safe{namespace="llm",pod="llama-2-7b-0",job="t",itl="0.1"}'
        values: "_ 90 90"
      - series: 'tracefit_slo_concurrency_safe{namespace="llm",pod="llama-2-7b-1",job="t",itl="0.03"}'
        values: "_ 12 0"
    promql_expr_test:
      - {expr: keda, eval_time: 0m, exp_samples: []}
      - {expr: keda, eval_time: 1m, exp_samples: [{labels: keda, value: 3}]}
      - {expr: keda, eval_time: 2m, exp_samples: [{labels: keda, value: 1}]}
      - {expr: adapter, eval_time: 1m, exp_samples: [{labels: 'adapter{pod="llama-2-7b-0"}', value: 2}]}
"""


def test_a_full_engine_asks_for_more_an_idle_one_for_none_and_an_unknown_one_for_nothing(tmp_path, promtool):
    """By KEDA 3 at a threshold of 0.8 are four pods; 40 requests where 20 fit are twice what fits.

    A pod of which nothing is known yet is as full by KEDA as its requests make one of the others.
    """
    rules = [
        {"record": name, "expr": expr}
        for name, expr in (("keda", TRIGGER["metadata"]["query"]), ("adapter", BY_THE_ADAPTER))
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "autoscaling", "rules": rules}]}))
    (tmp_path / "loads.yaml").write_text(LOADS)
    output_of(promtool, "test", "rules", tmp_path / "loads.yaml")
