"""The /metrics page in the text format of Prometheus: a snapshot by one table of families, and our own counters.

Every label value comes from a closed set, except ``config``, whose number is capped by the learner, and those of
``tracefit_config_info``, which has one series per configuration. What is not known is absent, never zero, never NaN.

The time of a step has every family; what is said of other targets is in the snapshot, or the page would not fit.
A configuration that would make the page too long is withheld, and its series are counted. Observed TTFT is
QUEUED -> FIRST_TOKEN plus the learned means of what comes before and after, as in the predicted one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from exporters.what_if import Advisory, LoadView
from exporters.wording import REPLICAS_SHOWN, STEP_TIME, US_PER_S, base_unit, printable
from online import ConfigSnapshot, Snapshot, TargetSnapshot

NS_PER_S = 1e9
BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"
_API_TARGETS = ("api_queueing", "first_response")

DEFAULT_MAX_SERIES = 6600
"""50 configurations with everything the default sets can publish need 50 x 117 series, and 50 x 15 with the verdict and
advice; with 6 of the page and at most 343 of the process, a scrape has no more than 7,000."""

_SAME_NAME = (
    "gpu tensor_parallel_size expert_parallel data_parallel_size dtype quantization vllm_version max_num_seqs "
    "max_num_batched_tokens max_model_len block_size enable_chunked_prefill enable_prefix_caching cpu_offload "
    "async_scheduling"
)
# `model` is the learner's feature set in every other family
IDENTITY_LABELS: tuple[tuple[str, str], ...] = (("model", "model_name"), *((key, key) for key in _SAME_NAME.split()))
"""Identity key of a configuration -> label of ``tracefit_config_info``; an unknown fact is the empty string."""


class Family(NamedTuple):
    """One row of the table of families."""

    name: str
    labels: tuple[str, ...]
    help: str
    kind: str = "gauge"


_CONFIG = ("config",)
_TARGET = (*_CONFIG, "vector", "target")
_MODEL = (*_TARGET, "model")
_FEATURE = (*_MODEL, "feature", "unit")
_IDENTITY = (*_CONFIG, "name", *(label for _, label in IDENTITY_LABELS))

FAMILIES: tuple[Family, ...] = (
    Family("tracefit_config_info", _IDENTITY, "What a configuration is; always 1. An unknown fact is an empty label."),
    Family("tracefit_coefficient", _FEATURE, "Learned coefficient, in the unit of its label."),
    Family("tracefit_coefficient_stderr", _FEATURE, "Standard error of a coefficient, in its unit."),
    Family("tracefit_telemetry_quality", (*_CONFIG, "quality"), "1 for the telemetry that is learned from."),
    Family("tracefit_error_median_ratio", _MODEL, "Median relative error of predictions by the coefficients alone."),
    Family("tracefit_error_p90_ratio", _TARGET, "90th percentile of the champion's relative error; step_time only."),
    Family("tracefit_live_error_median_ratio", _TARGET, "The verdict's median relative error; step_time only."),
    Family("tracefit_step_residual_ratio", _TARGET, "Observed ÷ predicted time; step_time only.", "histogram"),
    Family(
        "tracefit_usable",
        _CONFIG,
        "1 if predictions of steps may be used where something was seen, else 0. Absent of a configuration whose "
        "engines are silent for ten minutes, or whose server came back as another one.",
    ),
    Family(
        "tracefit_last_heard_timestamp_seconds",
        _CONFIG,
        "When the newest event or page of its engines was made, by their clocks; not of merged states.",
    ),
    Family(
        "tracefit_slo_concurrency",
        (*_CONFIG, "itl"),
        "Most requests in flight that keep this mean ITL (in seconds), for the load of the last minute; absent "
        "where that is not usable or beyond 1.25 times the largest batch seen.",
    ),
    Family(
        "tracefit_slo_concurrency_safe",
        (*_CONFIG, "itl"),
        "The same by the upper end of the band of ITL: what an autoscaler should follow.",
    ),
    Family("tracefit_predicted_itl_seconds", _CONFIG, "Predicted mean ITL of the load of the last minute."),
    Family("tracefit_predicted_ttft_seconds", _CONFIG, "Predicted mean TTFT of the same load."),
    Family("tracefit_observed_itl_seconds", _CONFIG, "Mean ITL of the requests that finished in it."),
    Family(
        "tracefit_observed_ttft_seconds",
        _CONFIG,
        "Their mean TTFT. Without a tracefit_coefficient of api_queueing, both TTFT are without the API process.",
    ),
    Family(
        "tracefit_load",
        (*_CONFIG, "of"),
        "This load, per engine: concurrency, prompt_tokens, output_tokens, prefix_hit_ratio.",
    ),
    Family("tracefit_coefficient_status", (*_FEATURE, "status"), "1 for the status of a coefficient; portable only."),
    Family("tracefit_drift_detections_total", _TARGET, "Confirmed changes of speed.", "counter"),
    Family("tracefit_engines", (*_CONFIG, "scheduling"), "Engines seen, by scheduling mode."),
    Family(
        "tracefit_interval_ratio",
        (*_TARGET, "bound"),
        "10th (lower) and 90th (upper) percentile of observed ÷ predicted time; step_time only.",
    ),
    Family("tracefit_drift_last_timestamp_seconds", _TARGET, "When speed last changed, if ever; step_time only."),
    Family(
        "tracefit_drift_gain_ratio",
        (*_TARGET, "term"),
        "New ÷ old time at the last change of speed, and the term that moved, empty while unknown; step_time only.",
    ),
    Family(
        "tracefit_replica_speed_ratio",
        (*_TARGET, "instance"),
        "Time of one engine ÷ that of the others, for the 16 furthest from them; step_time only.",
    ),
    Family(
        "tracefit_replica_differs",
        (*_TARGET, "instance", "term"),
        "1 for each of those that differs by more than 5 % and three errors, and in which term; step_time only.",
    ),
)
"""Every per-configuration family."""

PAGE_FAMILIES: tuple[Family, ...] = (
    Family("tracefit_snapshot_generation", (), "Generation of the snapshot this page shows."),
    Family("tracefit_snapshot_created_timestamp_seconds", (), "When that snapshot was made."),
    Family("tracefit_snapshot_configs", (), "Configurations in the snapshot."),
    Family("tracefit_exposition_series", (), "Series of the snapshot on this page."),
    Family("tracefit_exposition_series_capacity", (), "Most series of the snapshot that a page may show."),
    Family("tracefit_exposition_series_withheld", (), "Series withheld, for the page is full."),
)
"""Families about the page itself; always shown once there is a snapshot."""


Values = Iterator[tuple[Any, ...]]
"""A family, labels, a value, None for nothing, and a suffix, whose label stands last; of a target, without the labels
that all of it have."""


Key = tuple[str, tuple[str, ...]]
"""Suffix and labels of a series."""


def _shown(values: Values) -> dict[tuple[str, Key], float]:
    """Series by family. Absent beats wrong: what is not finite never leaves; of equal labels the last stays."""
    return {
        (family, ("".join(suffix), tuple(map(printable, labels)))): value
        for family, labels, value, *suffix in values
        if value is not None and math.isfinite(value)
    }


def snapshot_families(
    snapshot: Snapshot, advisory: Advisory, now_unix_nano: int = 0, max_series: int = DEFAULT_MAX_SERIES
) -> Iterator[Metric]:
    """Metric families of one snapshot, in the order of the tables; empty ones are left out.

    At most ``max_series`` of ``FAMILIES``. ``advisory`` has verdicts, and what the coefficients say of the load of the
    last minute; of a configuration whose engines are gone nothing of it is shown.
    """
    by_family: dict[str, dict[Key, float]] = {family.name: {} for family in FAMILIES}
    count = withheld = 0
    for config, legend in zip(snapshot.configs, _legends(snapshot.configs), strict=True):
        values = [_config_values(config, legend)]
        view = advisory.of(snapshot, config)
        if not view.verdict.silent_since(now_unix_nano):
            values.append(_load_values(config, view))
        own = _shown(chain(*values))
        if count + len(own) > max_series:
            withheld += len(own)
            continue
        count += len(own)
        for (family_name, key), value in own.items():
            by_family[family_name][key] = value
    created_s = snapshot.created_unix_nano / NS_PER_S
    page = (snapshot.generation, created_s, len(snapshot.configs), count, max_series, withheld)
    for family, value in zip(PAGE_FAMILIES, page, strict=True):
        yield _metric(family, {("", ()): value})
    for family in FAMILIES:
        if by_family[family.name]:
            yield _metric(family, by_family[family.name])


def _metric(family: Family, series: Mapping[Key, float]) -> Metric:
    metric = Metric(family.name.removesuffix("_total"), family.help, family.kind)
    for (suffix, labels), value in series.items():
        names = (*family.labels, "le") if suffix == BUCKET else family.labels
        metric.add_sample(family.name + suffix, dict(zip(names, labels, strict=True)), value)
    return metric


def _legends(configs: Sequence[ConfigSnapshot]) -> list[str]:
    """What people call configurations: model · GPU · TP as far as known, the hash behind it where two have the same."""
    words = {"model": "{}", "gpu": "{}", "tensor_parallel_size": "TP {}"}
    names = [[form.format(each.config[key]) for key, form in words.items() if each.config.get(key)] for each in configs]
    often = Counter(map(tuple, names))
    return [
        " · ".join(name if name and often[tuple(name)] == 1 else [*name, config.config_id])
        for name, config in zip(names, configs, strict=True)
    ]


def _config_values(config: ConfigSnapshot, legend: str) -> Values:
    of_config = (config.config_id,)
    identity = (config.config.get(key, "") for key, _ in IDENTITY_LABELS)
    plain = (str(value).lower() if isinstance(value, bool) else str(value) for value in identity)
    yield "tracefit_config_info", (*of_config, legend, *plain), 1
    yield "tracefit_telemetry_quality", (*of_config, config.telemetry), 1
    yield "tracefit_last_heard_timestamp_seconds", of_config, config.last_heard_unix_nano / NS_PER_S or None
    for mode, engines in Counter(engine.scheduling for engine in config.engines).items():
        yield "tracefit_engines", (*of_config, mode), engines
    for name, target in config.targets.items():
        for part in (_target_values, _step_values) if name == STEP_TIME else (_target_values,):
            for family, more, *value in part(target):
                yield family, (*of_config, target.vector, name, *more), *value


def _target_values(target: TargetSnapshot) -> Values:
    """What is shown of every target."""
    yield "tracefit_drift_detections_total", (), target.drift and target.drift.count
    for name, model in target.models.items():
        if model.error is not None and model.features:
            yield "tracefit_error_median_ratio", (name,), model.error.median_ape
        for feature in model.features:
            unit, divisor = base_unit(feature.unit)
            labels = (name, feature.name, unit)
            yield "tracefit_coefficient", labels, feature.coefficient / divisor
            yield "tracefit_coefficient_stderr", labels, feature.stderr and feature.stderr / divisor
            if name == "portable":
                yield "tracefit_coefficient_status", (*labels, feature.status), 1


def _step_values(target: TargetSnapshot) -> Values:
    """What is shown of step_time alone: errors, when its speed changed, and which engines differ from the others."""
    if target.interval is not None:
        yield "tracefit_interval_ratio", ("lower",), target.interval.p10
        yield "tracefit_interval_ratio", ("upper",), target.interval.p90
    champion = target.models.get(target.champion)
    yield "tracefit_error_p90_ratio", (), champion and champion.error and champion.error.p90_ape
    if (drift := target.drift) is not None:
        yield "tracefit_drift_last_timestamp_seconds", (), drift.last_unix_nano and drift.last_unix_nano / NS_PER_S
        yield "tracefit_drift_gain_ratio", (drift.term,), drift.gain
    if (residuals := target.residuals) is not None and math.isfinite(residuals.ratio_sum):  # half a histogram is none
        bounds = (*map(floatToGoString, residuals.ratio_bounds), "+Inf")
        for bound, below in zip(bounds, accumulate(residuals.rows), strict=False):
            yield "tracefit_step_residual_ratio", (bound,), below, BUCKET
        yield "tracefit_step_residual_ratio", (), sum(residuals.rows), COUNT
        yield "tracefit_step_residual_ratio", (), residuals.ratio_sum, SUM
    for replica in target.replicas[:REPLICAS_SHOWN]:
        yield "tracefit_replica_speed_ratio", (replica.engine,), replica.ratio
        if replica.differs and replica.ratio is not None:
            yield "tracefit_replica_differs", (replica.engine, replica.term), 1


def _load_values(config: ConfigSnapshot, view: LoadView) -> Values:
    """What the coefficients say of the load of the last minute, beside what was observed of it."""
    of_config, mix, predicted = (config.config_id,), view.workload, view.predicted
    yield "tracefit_usable", of_config, float(view.verdict.usable)
    if (step := config.targets.get(STEP_TIME)) is not None:
        yield "tracefit_live_error_median_ratio", (*of_config, step.vector, STEP_TIME), view.verdict.error
    if mix is not None:
        api = (config.targets.get(name) for name in _API_TARGETS)
        api_us = sum(target.mean_us or 0.0 for target in api if target is not None)
        ttft_us = None if mix.ttft_us is None else mix.ttft_us + api_us
        yield "tracefit_observed_itl_seconds", of_config, _seconds(mix.itl_us)
        yield "tracefit_observed_ttft_seconds", of_config, _seconds(ttft_us)
        for of in ("concurrency", "prompt_tokens", "output_tokens"):
            yield "tracefit_load", (*of_config, of), getattr(mix, of)
        yield "tracefit_load", (*of_config, "prefix_hit_ratio"), mix.prefix_hit
        if predicted is not None:
            itl_us = None if mix.itl_us is None else predicted.itl_us
            yield "tracefit_predicted_itl_seconds", of_config, _seconds(itl_us)
            yield "tracefit_predicted_ttft_seconds", of_config, _seconds(predicted.ttft_us)
    for fit in view.fits:
        labels = (*of_config, f"{fit.itl_ms / 1e3:.6g}")
        yield "tracefit_slo_concurrency", labels, fit.concurrency
        yield "tracefit_slo_concurrency_safe", labels, fit.safe


def _seconds(us: float | None) -> float | None:
    return None if us is None else us / US_PER_S


class _Families(Collector):
    """Families of metrics; a gauge that has nothing to compare has no series, rather than NaN."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            family.samples = [sample for sample in family.samples if not math.isnan(sample.value)]
            yield family


def render_metrics(families: Iterable[Metric]) -> bytes:
    """Text for one scrape: of a snapshot, as :func:`snapshot_families`, or of the process's metrics."""
    return generate_latest(_Families(families))
