"""The /metrics page in the text format of Prometheus: a snapshot by one table of families, and our own counters.

Two parts with two lifetimes. The snapshot's families change with the generation: rendered once and kept. Our own
counters change between scrapes: rendered every time. The page is their concatenation. The table below is what code
renders from and documents are compared with; every label value comes from a closed set, except ``config``, whose number
is capped by the learner, and those of ``tracefit_config_info``, which has one series per configuration.

State is mirrored, not instrumented: every family is made anew from one immutable snapshot, so a configuration that left
the snapshot leaves the page, and Prometheus marks its series stale (Prometheus docs, "Writing exporters": never update
metrics on each scrape). What is not known is absent, never zero, never NaN. Values are in base units (seconds) at full
precision; the ``unit`` label says which.

The number of series is bounded by ``max_series``: families are listed in order of importance and the least important
are withheld, whole, until the page fits; then configurations, last first. What was withheld is counted on the page.
Observed TTFT is QUEUED -> FIRST_TOKEN plus the learned means of what comes before and after, as the predicted one has
them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from exporters.what_if import Advisory, LoadView, PerGeneration
from exporters.wording import US_PER_S, base_unit, label_value
from online import ConfigSnapshot, DriftSnapshot, ModelSnapshot, ResidualSnapshot, Snapshot, TargetSnapshot
from tracefit import TracefitError

NS_PER_S = 1e9
STEP_TIME = "step_time"
"""The target that has every family; what is said of the others is in the snapshot, or the page would not fit."""
SHAPES_MAX = 16
"""Batch shapes of a configuration: those with the most rows."""
REPLICAS_MAX = 16
"""Engines of a merged state: those furthest from the others."""
BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"
_API_TARGETS = ("api_queueing", "first_response")

DEFAULT_MAX_SERIES = 7550
"""50 configurations with everything the default sets can publish need 50 x 151 series; with 7 of the page and at most
343 of the process, a scrape has no more than 7,900."""

_SAME_NAME = (
    "gpu tensor_parallel_size expert_parallel data_parallel_size dtype quantization vllm_version max_num_seqs "
    "max_num_batched_tokens max_model_len block_size enable_chunked_prefill enable_prefix_caching cpu_offload "
    "async_scheduling"
)
# `model` is the learner's feature set in every other family
IDENTITY_LABELS: tuple[tuple[str, str], ...] = (("model", "model_name"), *((key, key) for key in _SAME_NAME.split()))
"""Identity key of a configuration -> label of ``tracefit_config_info``; an unknown fact is the empty string."""


class Family(NamedTuple):
    """One row of the table of families; the order of the table is the order of importance."""

    name: str
    labels: tuple[str, ...]
    help: str
    kind: str = "gauge"


_TARGET = ("config", "vector", "target")
_MODEL = (*_TARGET, "model")
_FEATURE = (*_MODEL, "feature", "unit")

FAMILIES: tuple[Family, ...] = (
    Family(
        "tracefit_config_info",
        ("config", "name", *(label for _, label in IDENTITY_LABELS)),
        "What a configuration is; always 1. An unknown fact is an empty label; name is for legends.",
    ),
    Family("tracefit_coefficient", _FEATURE, "Learned coefficient, in the unit of its label."),
    Family("tracefit_coefficient_stderr", _FEATURE, "Standard error of a coefficient, in its unit."),
    Family(
        "tracefit_telemetry_quality",
        ("config", "quality"),
        "1 for the telemetry a configuration learns from: steps+, steps, sampled, journeys, requests, metrics, merged.",
    ),
    Family(
        "tracefit_error_median_ratio",
        _MODEL,
        "Median relative error of predictions made before learning, by the coefficients alone.",
    ),
    Family(
        "tracefit_error_p90_ratio",
        _TARGET,
        "90th percentile of the relative error of the champion's predictions made before learning; step_time only.",
    ),
    Family(
        "tracefit_live_error_median_ratio",
        _TARGET,
        "Median relative error of the published prediction: coefficients times shape factors, corrected while "
        "tracefit_correction_active is 1; step_time only.",
    ),
    Family(
        "tracefit_step_residual_ratio",
        _TARGET,
        "Observed time divided by what the champion had predicted before it learned the row; step_time only.",
        "histogram",
    ),
    Family(
        "tracefit_target_residual_ratio",
        _TARGET,
        "The same of every target but step_time: sum and number of rows.",
        "summary",
    ),
    Family(
        "tracefit_usable",
        ("config",),
        "1 if predictions of steps may be used where something was seen, else 0; the status page says why not. Absent "
        "of a configuration whose server came back as another one.",
    ),
    Family(
        "tracefit_last_heard_timestamp_seconds",
        ("config",),
        "When the newest event or page of its engines was made, by their clocks, as of this snapshot; not of merged "
        "states.",
    ),
    Family(
        "tracefit_slo_concurrency",
        ("config", "itl"),
        "Most requests in flight whose mean ITL keeps a target of slo.itl_ms (itl, in seconds), for the load of the "
        "last five minutes; absent where that is not usable or beyond 1.25 times the largest batch seen.",
    ),
    Family(
        "tracefit_slo_concurrency_safe",
        ("config", "itl"),
        "The same with the upper end of the band of ITL held against the target: what an autoscaler should follow.",
    ),
    Family(
        "tracefit_predicted_itl_seconds",
        ("config",),
        "Mean time between tokens that the coefficients say of the load of the last five minutes.",
    ),
    Family(
        "tracefit_predicted_ttft_seconds",
        ("config",),
        "Mean time to first token that the coefficients say of the load of the last five minutes.",
    ),
    Family(
        "tracefit_observed_itl_seconds",
        ("config",),
        "Mean time between tokens of the requests that finished in the last five minutes.",
    ),
    Family(
        "tracefit_observed_ttft_seconds",
        ("config",),
        "Mean time to first token of the same requests, with the usual time in the API process.",
    ),
    Family(
        "tracefit_load",
        ("config", "of"),
        "The load of the last five minutes, per engine: concurrency, prompt_tokens, output_tokens, prefix_hit_ratio.",
    ),
    Family("tracefit_model_effective_rows", _MODEL, "Rows that still count, after forgetting; portable only."),
    Family(
        "tracefit_coefficient_status",
        (*_FEATURE, "status"),
        "1 for the status: identified, weak, at_bound, prior_only, constant, unidentified; portable only.",
    ),
    Family("tracefit_drift_detections_total", _TARGET, "Confirmed changes of speed.", "counter"),
    Family("tracefit_engines", ("config", "scheduling"), "Engines seen, by scheduling mode."),
    Family(
        "tracefit_champion",
        _MODEL,
        "1 for the model with the least error, until another has 5 % less; absent where that is portable.",
    ),
    Family(
        "tracefit_interval_ratio",
        (*_TARGET, "bound"),
        "Observed time divided by the prediction: 10th (lower) and 90th (upper) percentile; step_time only.",
    ),
    Family("tracefit_target_mean_seconds", _TARGET, "Plain mean of what was observed."),
    Family(
        "tracefit_drift_last_timestamp_seconds", _TARGET, "When speed last changed; absent if never; step_time only."
    ),
    Family(
        "tracefit_drift_gain_ratio",
        _TARGET,
        "New time divided by old time at the last change of speed; step_time only.",
    ),
    Family(
        "tracefit_engines_apart_ratio",
        _TARGET,
        "Time of the engine that differs most by that of the others, for the same steps; absent of one engine.",
    ),
    Family(
        "tracefit_level_ratio",
        (*_TARGET, "phase"),
        "Time of the last steps per time by coefficients and shape factors: decode (without prefill), prefill; 1 "
        "where no level predicts better. It tells of the seconds after tracefit_last_heard_timestamp_seconds.",
    ),
    Family(
        "tracefit_correction_active",
        _TARGET,
        "1 while River's regression is in the published prediction, 0 while it would not help; absent without it.",
    ),
    Family(
        "tracefit_shaped_error_median_ratio",
        _TARGET,
        "Median relative error of coefficients times shape factors, without level and correction: what a reader of a "
        "file computes.",
    ),
    Family(
        "tracefit_predictor_error_median_ratio",
        _MODEL,
        "Median relative error of models that publish no coefficients, over the rows they see; step_time only.",
    ),
    Family(
        "tracefit_shape_factor_ratio",
        (*_TARGET, "shape"),
        "Time of a step per time by the coefficients, by batch shape, the 16 with most rows; portable, step_time only.",
    ),
    Family(
        "tracefit_replicas_differing",
        _TARGET,
        "Of a merged state, engines that differ from the others by more than 5 % and three errors; step_time only.",
    ),
    Family(
        "tracefit_replica_speed_ratio",
        (*_TARGET, "instance"),
        "Of a merged state, an engine's time per time of the others, the 16 furthest from them; step_time only.",
    ),
    Family(
        "tracefit_replica_differs",
        (*_TARGET, "instance"),
        "1 for each of those 16 that differs from the others by more than 5 % and three errors; step_time only.",
    ),
)
"""Every per-configuration family, most important first."""

PAGE_FAMILIES: tuple[Family, ...] = (
    Family("tracefit_snapshot_generation", (), "Generation of the snapshot this page shows."),
    Family("tracefit_snapshot_created_timestamp_seconds", (), "When that snapshot was made."),
    Family("tracefit_snapshot_configs", (), "Configurations in the snapshot."),
    Family("tracefit_exposition_series", (), "Series of the snapshot on this page."),
    Family("tracefit_exposition_series_capacity", (), "Most series of the snapshot that a page may show."),
    Family("tracefit_exposition_series_withheld", (), "Series withheld because the page is full."),
    Family(
        "tracefit_exposition_values_withheld",
        (),
        "Values withheld because they are not finite, or name a series twice.",
    ),
)
"""Families about the page itself; always shown once there is a snapshot."""


class Sample(NamedTuple):
    """One series of a family before rendering; a ``suffix`` that has a label of its own has its value last."""

    labels: tuple[str, ...]
    value: float
    suffix: str = ""


Samples = dict[str, list[Sample]]
"""By family."""


def fit_samples(merged: Samples, max_series: int) -> int:
    """Empty the least important families, then shorten the rest, until they fit; returns what is left."""
    shown = sum(map(len, merged.values()))
    for family in reversed(FAMILIES[2:]):
        if shown <= max_series:
            return shown
        shown -= len(merged[family.name])
        merged[family.name] = []
    if shown > max_series:  # even what and how much does not fit: as many configurations as do, in snapshot order
        info, coefficients = (merged[family.name] for family in FAMILIES[:2])
        room = max_series
        kept: set[str] = set()
        counts: dict[str, int] = {}
        for sample in coefficients:
            counts[sample.labels[0]] = counts.get(sample.labels[0], 0) + 1
        for sample in info:
            need = 1 + counts.get(sample.labels[0], 0)
            if need > room:
                break
            room -= need
            kept.add(sample.labels[0])
        info[:] = [sample for sample in info if sample.labels[0] in kept]
        coefficients[:] = [sample for sample in coefficients if sample.labels[0] in kept]
        shown = len(info) + len(coefficients)
    return shown


def drop_non_finite(samples: Samples) -> int:
    """Absent beats wrong: a value that is not finite never leaves; returns how many there were."""
    dropped = 0
    for name, rows in samples.items():
        finite = [sample for sample in rows if math.isfinite(sample.value)]
        dropped += len(rows) - len(finite)
        samples[name] = finite
    return dropped


def drop_repeated(merged: Samples) -> int:
    """One value per series, the first: names that differ only in what a label cannot hold would give two."""
    dropped = 0
    for name, rows in merged.items():
        unique: dict[tuple[str, tuple[str, ...]], Sample] = {}
        for sample in rows:
            unique.setdefault((sample.suffix, sample.labels), sample)
        dropped += len(rows) - len(unique)
        merged[name] = list(unique.values())
    return dropped


def snapshot_families(
    snapshot: Snapshot,
    max_series: int = DEFAULT_MAX_SERIES,
    advisory: Advisory | None = None,
) -> Iterator[Metric]:
    """Turn one snapshot into metric families.

    Args:
        snapshot: what to show.
        max_series: bound on the series of the families in ``FAMILIES``.
        advisory: what the coefficients say of the load of the last minutes; nothing of a configuration whose server
            sends another one now.

    Yields:
        Families in the order of the tables; empty ones are left out.
    """
    legends = _legends(snapshot.configs)
    per_config = [_config_samples(config, legend) for config, legend in zip(snapshot.configs, legends, strict=True)]
    for config, samples in zip(snapshot.configs, per_config, strict=True):
        if advisory is not None and not config.replaced_by:
            with contextlib.suppress(TracefitError):
                _load_samples(samples, config, advisory.of(snapshot, config))
    unusable = sum(drop_non_finite(samples) for samples in per_config)
    merged: Samples = {family.name: [] for family in FAMILIES}
    for samples in per_config:
        for name, rows in samples.items():
            merged[name].extend(rows)
    unusable += drop_repeated(merged)
    total = sum(map(len, merged.values()))
    shown = fit_samples(merged, max_series)
    page = {
        "tracefit_snapshot_generation": snapshot.generation,
        "tracefit_snapshot_created_timestamp_seconds": snapshot.created_unix_nano / NS_PER_S,
        "tracefit_snapshot_configs": len(snapshot.configs),
        "tracefit_exposition_series": shown,
        "tracefit_exposition_series_capacity": max_series,
        "tracefit_exposition_series_withheld": total - shown,
        "tracefit_exposition_values_withheld": unusable,
    }
    for family in PAGE_FAMILIES:
        yield _metric(family, [Sample((), page[family.name])])
    for family in FAMILIES:
        if merged[family.name]:
            yield _metric(family, merged[family.name])


def _metric(family: Family, samples: list[Sample]) -> Metric:
    if family.kind == "counter":
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for sample in samples:
            counter.add_metric(sample.labels, sample.value)
        return counter
    if family.kind in ("histogram", "summary"):
        metric = Metric(family.name, family.help, family.kind)
        for sample in samples:
            names = (*family.labels, "le") if sample.suffix == BUCKET else family.labels
            metric.add_sample(family.name + sample.suffix, dict(zip(names, sample.labels, strict=True)), sample.value)
        return metric
    gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
    for sample in samples:
        gauge.add_metric(sample.labels, sample.value)
    return gauge


def _legends(configs: Sequence[ConfigSnapshot]) -> list[str]:
    """What people call configurations: model · GPU · TP as far as known, the hash behind it where two have the same."""
    names = []
    for config in configs:
        model, gpu, degree = (config.config.get(key, "") for key in ("model", "gpu", "tensor_parallel_size"))
        facts = (str(model), str(gpu), f"TP {degree}" if degree else "")
        names.append(" · ".join(filter(None, facts)))
    often = Counter(names)
    return [
        name if name and often[name] == 1 else " · ".join(filter(None, (name, config.config_id)))
        for name, config in zip(names, configs, strict=True)
    ]


def _config_samples(config: ConfigSnapshot, legend: str) -> Samples:
    config_id = label_value(config.config_id)
    samples: Samples = {family.name: [] for family in FAMILIES}
    identity = (label_value(_plain(config.config.get(key, ""))) for key, _ in IDENTITY_LABELS)
    samples["tracefit_config_info"].append(Sample((config_id, label_value(legend), *identity), 1))
    samples["tracefit_telemetry_quality"].append(Sample((config_id, label_value(config.telemetry)), 1))
    if config.last_heard_unix_nano:
        heard_s = config.last_heard_unix_nano / NS_PER_S
        samples["tracefit_last_heard_timestamp_seconds"].append(Sample((config_id,), heard_s))
    modes = [engine.scheduling for engine in config.engines]
    for mode in dict.fromkeys(modes):
        samples["tracefit_engines"].append(Sample((config_id, label_value(mode)), modes.count(mode)))
    for name, target in config.targets.items():
        labels = (config_id, label_value(target.vector), label_value(name))
        _target_samples(samples, labels, target)
        if target.drift is not None:
            _drift_samples(samples, labels, target.drift)
    return samples


def _plain(value: str | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _target_samples(samples: Samples, labels: tuple[str, ...], target: TargetSnapshot) -> None:
    if target.mean_us is not None:
        samples["tracefit_target_mean_seconds"].append(Sample(labels, target.mean_us / US_PER_S))
    if target.residuals is not None:
        _residual_samples(samples, labels, target.residuals)
    champion = target.models.get(target.champion)
    if champion is not None and target.champion != "portable":
        samples["tracefit_champion"].append(Sample((*labels, label_value(target.champion)), 1))
    for name, model in target.models.items():
        _model_samples(samples, (*labels, label_value(name)), model)
    if labels[-1] == STEP_TIME:
        _step_samples(samples, labels, target)


def _step_samples(samples: Samples, labels: tuple[str, ...], target: TargetSnapshot) -> None:
    """What is shown of step_time alone."""
    if target.interval is not None:
        for bound, ratio in (("lower", target.interval.p10), ("upper", target.interval.p90)):
            samples["tracefit_interval_ratio"].append(Sample((*labels, bound), ratio))
    champion = target.models.get(target.champion)
    if champion is not None and champion.error is not None:
        samples["tracefit_error_p90_ratio"].append(Sample(labels, champion.error.p90_ape))
    error = target.prediction_error
    if error is not None:
        samples["tracefit_live_error_median_ratio"].append(Sample(labels, error.median_ape))
    most = sorted(target.shape_factors.items(), key=lambda item: (-item[1].rows, item[0]))[:SHAPES_MAX]
    for shape, each in sorted(most):
        samples["tracefit_shape_factor_ratio"].append(Sample((*labels, label_value(shape)), each.factor))
    _samples_of_now(samples, labels, target)
    if target.replicas:
        _replica_samples(samples, labels, target)
    if (portable := target.models.get("portable")) is not None and portable.shaped_error is not None:
        samples["tracefit_shaped_error_median_ratio"].append(Sample(labels, portable.shaped_error.median_ape))


def _samples_of_now(samples: Samples, labels: tuple[str, ...], target: TargetSnapshot) -> None:
    """Level and correction."""
    for phase, level in target.level.items():
        samples["tracefit_level_ratio"].append(Sample((*labels, label_value(phase)), level.factor))
    if target.correction is not None:
        samples["tracefit_correction_active"].append(Sample(labels, int(target.correction.active)))


def _replica_samples(samples: Samples, labels: tuple[str, ...], target: TargetSnapshot) -> None:
    samples["tracefit_replicas_differing"].append(Sample(labels, sum(each.differs for each in target.replicas)))
    for replica in target.replicas[:REPLICAS_MAX]:
        if replica.ratio is not None:
            labelled = (*labels, label_value(replica.engine))
            samples["tracefit_replica_speed_ratio"].append(Sample(labelled, replica.ratio))
            if replica.differs:
                samples["tracefit_replica_differs"].append(Sample(labelled, 1))


def _residual_samples(samples: Samples, labels: tuple[str, ...], residuals: ResidualSnapshot) -> None:
    whole = labels[-1] == STEP_TIME
    rows = samples["tracefit_step_residual_ratio" if whole else "tracefit_target_residual_ratio"]
    if not 0.0 <= residuals.ratio_sum < math.inf:  # one value to withhold: half a histogram is none
        rows.append(Sample(labels, math.nan, suffix=SUM))
        return
    if whole:
        bounds = (*map(floatToGoString, residuals.ratio_bounds), "+Inf")
        for bound, below in zip(bounds, accumulate(residuals.rows), strict=False):
            rows.append(Sample((*labels, bound), below, suffix=BUCKET))
    rows.append(Sample(labels, sum(residuals.rows), suffix=COUNT))
    rows.append(Sample(labels, residuals.ratio_sum, suffix=SUM))


def _drift_samples(samples: Samples, labels: tuple[str, ...], drift: DriftSnapshot) -> None:
    samples["tracefit_drift_detections_total"].append(Sample(labels, drift.count))
    if labels[-1] != STEP_TIME:
        return
    if drift.last_unix_nano is not None:
        samples["tracefit_drift_last_timestamp_seconds"].append(Sample(labels, drift.last_unix_nano / NS_PER_S))
    if drift.gain is not None:
        samples["tracefit_drift_gain_ratio"].append(Sample(labels, drift.gain))
    if drift.engines_apart is not None:
        samples["tracefit_engines_apart_ratio"].append(Sample(labels, drift.engines_apart))


def _model_samples(samples: Samples, labels: tuple[str, ...], model: ModelSnapshot) -> None:
    target, name = labels[-2:]
    if model.error is not None and (model.features or target == STEP_TIME):
        family = "tracefit_error_median_ratio" if model.features else "tracefit_predictor_error_median_ratio"
        samples[family].append(Sample(labels, model.error.median_ape))
    for feature in model.features:
        unit, divisor = base_unit(feature.unit)
        full = (*labels, label_value(feature.name), unit)
        samples["tracefit_coefficient"].append(Sample(full, feature.coefficient / divisor))
        if feature.stderr is not None:
            samples["tracefit_coefficient_stderr"].append(Sample(full, feature.stderr / divisor))
        if name == "portable":
            samples["tracefit_coefficient_status"].append(Sample((*full, label_value(feature.status)), 1))
    if name == "portable":
        samples["tracefit_model_effective_rows"].append(Sample(labels, model.effective_rows))


def _load_samples(samples: Samples, config: ConfigSnapshot, view: LoadView) -> None:
    """What the coefficients say of the load of the last minutes, beside what was observed of it."""
    config_id = label_value(config.config_id)

    def add(family: str, value: float | None, *labels: str) -> None:
        if value is not None:
            samples[family].append(Sample((config_id, *labels), value))

    add("tracefit_usable", float(view.config.verdict.usable))
    if view.mix is not None:
        mix = view.mix
        add("tracefit_observed_itl_seconds", None if mix.itl_us is None else mix.itl_us / US_PER_S)
        if mix.ttft_us is not None:
            targets = (config.targets.get(name) for name in _API_TARGETS)
            api_us = sum(target.mean_us or 0.0 for target in targets if target is not None)
            add("tracefit_observed_ttft_seconds", (mix.ttft_us + api_us) / US_PER_S)
        add("tracefit_load", mix.concurrency, "concurrency")
        add("tracefit_load", mix.prompt_tokens, "prompt_tokens")
        add("tracefit_load", mix.output_tokens, "output_tokens")
        add("tracefit_load", mix.prefix_hit, "prefix_hit_ratio")
        if view.seen is not None:
            add("tracefit_predicted_itl_seconds", None if mix.itl_us is None else view.seen.itl.us / US_PER_S)
            add("tracefit_predicted_ttft_seconds", view.seen.ttft.us / US_PER_S)
    for fit in view.fits:
        itl = f"{fit.itl_ms / 1e3:.6g}"
        add("tracefit_slo_concurrency", fit.concurrency, itl)
        add("tracefit_slo_concurrency_safe", fit.safe, itl)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Known(Collector):
    """What somebody's metrics say now: a gauge that has nothing to compare has no series, rather than NaN."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterable[Metric]:
        for family in self._own.collect():
            family.samples = [sample for sample in family.samples if not math.isnan(sample.value)]
            yield family


class MetricsPage:
    """Renders /metrics from our own registry and the newest snapshot.

    Args:
        own: registry (or any collector) with the process's own metrics; asked at every scrape.
        source: returns the newest snapshot, or None before the first.
        max_series: capacity of the page for series of the snapshot.
        advisory: what the coefficients say of the load of the last minutes.
    """

    def __init__(
        self,
        own: Collector,
        source: Callable[[], Snapshot | None],
        *,
        max_series: int = DEFAULT_MAX_SERIES,
        advisory: Advisory | None = None,
    ) -> None:
        self._own = _Known(own)
        self._source = source
        self._max_series = max_series
        self._advisory = advisory
        self._kept = PerGeneration[str, bytes]()

    def render(self) -> bytes:
        """The page for one scrape."""
        return self._kept.get(self._source, "", self._render_kept) + generate_latest(self._own)

    def _render_kept(self, snapshot: Snapshot | None) -> bytes:
        """The part of the page that stays the same for a generation."""
        families: Iterable[Metric] = ()
        if snapshot is not None:
            families = snapshot_families(snapshot, self._max_series, self._advisory)
        return generate_latest(_Families(families))
