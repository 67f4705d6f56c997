"""The /metrics page in the text format of Prometheus: a snapshot as metric families, with advice, and our own counters.

Two parts with two lifetimes. The snapshot's families change with the generation: rendered once and kept. Our own
counters change between scrapes: rendered every time. The page is their concatenation.

State is mirrored, not instrumented: every family is made anew from one immutable snapshot, so a configuration that left
the snapshot leaves the page, and Prometheus marks its series stale (Prometheus docs, "Writing exporters": never update
metrics on each scrape). What is not known is absent, never zero, never NaN. Values are in base units (seconds) at full
precision; the ``unit`` label says which.

The number of series is bounded by ``max_series``: families are listed in order of importance and the least important
are withheld, whole, until the page fits; then configurations, last first. What was withheld is counted on the page.

The advice among the families says what requests should see at the load of the last minutes, and how many fit:

    predicted ITL, TTFT         tracefit.Config.request at the mix, by the level of now, beside what was observed
    concurrency of a target     tracefit.Config.plan: most requests in flight whose mean ITL keeps it, for that mix
    its safe end                the same plan with the upper end of the band held against the target
    usable                      the client's verdict; its reasons are on the status page and in /predict

The client is asked for it once a generation, when the page is first rendered. Where coefficients should not be used yet
there is no advice: an autoscaler without a metric stays as it is. So it is for a concurrency whose point is not usable,
or that lies beyond BATCH_REACH times the largest batch seen. Such a concurrency is left out and not capped: capped, it
would follow the load of the past. A pod that met its usual load would then look full, new pods would meet less, look
full at less, and the autoscaler would go on to its limit. Observed TTFT is QUEUED -> FIRST_TOKEN plus the learned
means of what comes before and after, as the predicted one has them.
"""

from __future__ import annotations

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

from exporters.client_view import ClientView, PerGeneration
from exporters.metric_families import (
    DEFAULT_MAX_SERIES,
    FAMILIES,
    IDENTITY_LABELS,
    PAGE_FAMILIES,
    Family,
    Sample,
    Samples,
    drop_non_finite,
    drop_repeated,
    fit_samples,
)
from exporters.what_if import Mix, MixOf
from exporters.wording import US_PER_S, base_unit, label_value
from online import ConfigSnapshot, DriftSnapshot, ModelSnapshot, ResidualSnapshot, Snapshot, TargetSnapshot
from tracefit import Config, TracefitError

_API_TARGETS = ("api_queueing", "first_response")
BATCH_REACH = 1.25
"""Times the largest batch seen: a plan that needs more is a guess about steps that nobody has met."""

_CONCURRENCY_FAMILIES = (("tracefit_slo_concurrency", False), ("tracefit_slo_concurrency_safe", True))


class AdvisorySample(NamedTuple):
    """A value of a family; ``labels`` come after ``config``."""

    family: str
    value: float
    labels: tuple[str, ...] = ()


AdviceOf = Callable[[Snapshot, ConfigSnapshot], Iterator[AdvisorySample]]


class Advisory:
    """Advice on each configuration.

    Args:
        view: predicts.
        mix_of: what a configuration was asked lately.
        itl_ms: targets for the mean time between tokens.
    """

    def __init__(self, view: ClientView, mix_of: MixOf, itl_ms: Sequence[float] = ()) -> None:
        self._view = view
        self._mix_of = mix_of
        self._itl_ms = itl_ms

    def samples(self, snapshot: Snapshot, config: ConfigSnapshot) -> Iterator[AdvisorySample]:
        """Everything that can be said of one configuration; nothing of one whose server sends another one now."""
        if config.replaced_by:
            return
        try:
            client = self._view.config(snapshot, config.config_id)
        except (LookupError, TracefitError):
            return
        yield AdvisorySample("tracefit_usable", float(client.usable))
        mix = self._mix_of(config.config_id)
        if mix is None:
            return
        yield from _observed(config, mix)
        if client.usable:
            try:
                yield from self._advised(client, mix, snapshot.created_unix_nano)
            except TracefitError:  # a mix that the engine cannot hold, or that makes no sense: no advice
                return

    def _advised(self, client: Config, mix: Mix, at_unix_nano: int) -> Iterator[AdvisorySample]:
        prompt, output, hit = mix.prompt_tokens, mix.output_tokens, mix.prefix_hit
        now = client.now(at_unix_nano)  # a plan is for more than seconds, and has no level
        seen = now.request(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, concurrency=mix.concurrency)
        if mix.itl_us is not None:
            yield AdvisorySample("tracefit_predicted_itl_seconds", seen.itl.us / US_PER_S)
        yield AdvisorySample("tracefit_predicted_ttft_seconds", seen.ttft.us / US_PER_S)
        for itl_ms in self._itl_ms:
            for family, safe in _CONCURRENCY_FAMILIES:
                plan = client.plan(prompt_tokens=prompt, output_tokens=output, prefix_hit=hit, itl_ms=itl_ms, safe=safe)
                if plan.at.usable and plan.concurrency <= BATCH_REACH * _largest_batch(client):
                    yield AdvisorySample(family, plan.concurrency, (f"{itl_ms / 1e3:.6g}",))


def _largest_batch(client: Config) -> float:
    """Most requests in a step that was learned from; 0 where nobody said."""
    seen = client.targets["step_time"].seen
    return 0.0 if seen is None else seen.features.get("requests", (0.0, 0.0))[1]


def _observed(config: ConfigSnapshot, mix: Mix) -> Iterator[AdvisorySample]:
    if mix.itl_us is not None:
        yield AdvisorySample("tracefit_observed_itl_seconds", mix.itl_us / US_PER_S)
    if mix.ttft_us is not None:
        targets = (config.targets.get(name) for name in _API_TARGETS)
        api_us = sum(target.mean_us or 0.0 for target in targets if target is not None)
        yield AdvisorySample("tracefit_observed_ttft_seconds", (mix.ttft_us + api_us) / US_PER_S)
    yield AdvisorySample("tracefit_load", mix.concurrency, ("concurrency",))
    yield AdvisorySample("tracefit_load", mix.prompt_tokens, ("prompt_tokens",))
    yield AdvisorySample("tracefit_load", mix.output_tokens, ("output_tokens",))
    yield AdvisorySample("tracefit_load", mix.prefix_hit, ("prefix_hit_ratio",))


NS_PER_S = 1e9


STEP_TIME = "step_time"
SHAPES_MAX = 16
"""Batch shapes of a configuration: those with the most rows."""
REPLICAS_MAX = 16
"""Engines of a merged state: those furthest from the others."""
"""The target that has every family; what is said of the others is in the snapshot, or the page would not fit."""

BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"


def snapshot_families(
    snapshot: Snapshot,
    max_series: int = DEFAULT_MAX_SERIES,
    advice_of: AdviceOf | None = None,
) -> Iterator[Metric]:
    """Turn one snapshot into metric families.

    Args:
        snapshot: what to show.
        max_series: bound on the series of the families in ``FAMILIES``.
        advice_of: what the coefficients say of the load of the last minutes.

    Yields:
        Families in the order of the tables; empty ones are left out.
    """
    legends = _legends(snapshot.configs)
    per_config = [_config_samples(config, legend) for config, legend in zip(snapshot.configs, legends, strict=True)]
    if advice_of is not None:
        for config, samples in zip(snapshot.configs, per_config, strict=True):
            for name, value, labels in advice_of(snapshot, config):
                samples[name].append(Sample((label_value(config.config_id), *labels), value))
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
        self._advice_of = None if advisory is None else advisory.samples
        self._kept = PerGeneration[str, bytes]()

    def render(self) -> bytes:
        """The page for one scrape."""
        return self._kept.get(self._source, "", self._render_kept) + generate_latest(self._own)

    def _render_kept(self, snapshot: Snapshot | None) -> bytes:
        """The part of the page that stays the same for a generation."""
        families: Iterable[Metric] = ()
        if snapshot is not None:
            families = snapshot_families(snapshot, self._max_series, self._advice_of)
        return generate_latest(_Families(families))
