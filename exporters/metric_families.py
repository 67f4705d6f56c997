"""The table of what a snapshot looks like in Prometheus: names, types, labels, help.

Code renders from it, documents are compared with it. Every label value comes from a closed set, except ``config``,
whose number is capped by the learner, and those of ``tracefit_config_info``, which has one series per configuration.

A table of its own beside ``collector.telemetry``'s: that one holds counters of a process, whose label sets exist from
the start; this one describes what is drawn from a snapshot, label values and all, and exporters never import the
collector.

A page withholds what is no number and what comes twice; of what does not fit, the families at the end of the table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DEFAULT_MAX_SERIES = 7550
"""50 configurations with everything the default sets can publish need 50 x 151 series; with 7 of the page and at most
343 of the process, a scrape has no more than 7,900."""

IDENTITY_LABELS: tuple[tuple[str, str], ...] = (
    ("model", "model_name"),  # `model` is the learner's feature set in every other family
    ("gpu", "gpu"),
    ("tensor_parallel_size", "tensor_parallel_size"),
    ("expert_parallel", "expert_parallel"),
    ("data_parallel_size", "data_parallel_size"),
    ("dtype", "dtype"),
    ("quantization", "quantization"),
    ("vllm_version", "vllm_version"),
    ("max_num_seqs", "max_num_seqs"),
    ("max_num_batched_tokens", "max_num_batched_tokens"),
    ("max_model_len", "max_model_len"),
    ("block_size", "block_size"),
    ("enable_chunked_prefill", "enable_chunked_prefill"),
    ("enable_prefix_caching", "enable_prefix_caching"),
    ("cpu_offload", "cpu_offload"),
    ("async_scheduling", "async_scheduling"),
)
"""Identity key of a configuration -> label of ``tracefit_config_info``; an unknown fact is the empty string."""


class Family(NamedTuple):
    """One row of the table of families; the order of the table is the order of importance."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_TARGET = ("config", "vector", "target")
_MODEL = (*_TARGET, "model")
_FEATURE = (*_MODEL, "feature", "unit")

FAMILIES: tuple[Family, ...] = (
    Family(
        "tracefit_config_info",
        "gauge",
        ("config", "name", *(label for _, label in IDENTITY_LABELS)),
        "What a configuration is; always 1. An unknown fact is an empty label; name is for legends.",
    ),
    Family("tracefit_coefficient", "gauge", _FEATURE, "Learned coefficient, in the unit of its label."),
    Family("tracefit_coefficient_stderr", "gauge", _FEATURE, "Standard error of a coefficient, in its unit."),
    Family(
        "tracefit_telemetry_quality",
        "gauge",
        ("config", "quality"),
        "1 for the telemetry a configuration learns from: steps+, steps, sampled, journeys, requests, metrics, merged.",
    ),
    Family(
        "tracefit_error_median_ratio",
        "gauge",
        _MODEL,
        "Median relative error of predictions made before learning, by the coefficients alone.",
    ),
    Family(
        "tracefit_error_p90_ratio",
        "gauge",
        _TARGET,
        "90th percentile of the relative error of the champion's predictions made before learning; step_time only.",
    ),
    Family(
        "tracefit_live_error_median_ratio",
        "gauge",
        _TARGET,
        "Median relative error of the published prediction: coefficients times shape factors, corrected while "
        "tracefit_correction_active is 1; step_time only.",
    ),
    Family(
        "tracefit_step_residual_ratio",
        "histogram",
        _TARGET,
        "Observed time divided by what the champion had predicted before it learned the row; step_time only.",
    ),
    Family(
        "tracefit_target_residual_ratio",
        "summary",
        _TARGET,
        "The same of every target but step_time: sum and number of rows.",
    ),
    Family(
        "tracefit_usable",
        "gauge",
        ("config",),
        "1 if predictions of steps may be used where something was seen, else 0; the status page says why not."
        " Absent of a configuration whose server came back as another one.",
    ),
    Family(
        "tracefit_last_heard_timestamp_seconds",
        "gauge",
        ("config",),
        "When the newest event or page of its engines was made, by their clocks, as of this snapshot; not of merged"
        " states.",
    ),
    Family(
        "tracefit_slo_concurrency",
        "gauge",
        ("config", "itl"),
        "Most requests in flight whose mean ITL keeps a target of slo.itl_ms (itl, in seconds), for the load of the"
        " last five minutes; absent where that is not usable or beyond 1.25 times the largest batch seen.",
    ),
    Family(
        "tracefit_slo_concurrency_safe",
        "gauge",
        ("config", "itl"),
        "The same with the upper end of the band of ITL held against the target: what an autoscaler should follow.",
    ),
    Family(
        "tracefit_predicted_itl_seconds",
        "gauge",
        ("config",),
        "Mean time between tokens that the coefficients say of the load of the last five minutes.",
    ),
    Family(
        "tracefit_predicted_ttft_seconds",
        "gauge",
        ("config",),
        "Mean time to first token that the coefficients say of the load of the last five minutes.",
    ),
    Family(
        "tracefit_observed_itl_seconds",
        "gauge",
        ("config",),
        "Mean time between tokens of the requests that finished in the last five minutes.",
    ),
    Family(
        "tracefit_observed_ttft_seconds",
        "gauge",
        ("config",),
        "Mean time to first token of the same requests, with the usual time in the API process.",
    ),
    Family(
        "tracefit_load",
        "gauge",
        ("config", "of"),
        "The load of the last five minutes, per engine: concurrency, prompt_tokens, output_tokens, prefix_hit_ratio.",
    ),
    Family("tracefit_model_effective_rows", "gauge", _MODEL, "Rows that still count, after forgetting; portable only."),
    Family(
        "tracefit_coefficient_status",
        "gauge",
        (*_FEATURE, "status"),
        "1 for the status: identified, weak, at_bound, prior_only, constant, unidentified; portable only.",
    ),
    Family("tracefit_drift_detections_total", "counter", _TARGET, "Confirmed changes of speed."),
    Family("tracefit_engines", "gauge", ("config", "scheduling"), "Engines seen, by scheduling mode."),
    Family(
        "tracefit_champion",
        "gauge",
        _MODEL,
        "1 for the model with the least error, until another has 5 % less; absent where that is portable.",
    ),
    Family(
        "tracefit_interval_ratio",
        "gauge",
        (*_TARGET, "bound"),
        "Observed time divided by the prediction: 10th (lower) and 90th (upper) percentile; step_time only.",
    ),
    Family("tracefit_target_mean_seconds", "gauge", _TARGET, "Plain mean of what was observed."),
    Family(
        "tracefit_drift_last_timestamp_seconds",
        "gauge",
        _TARGET,
        "When speed last changed; absent if never; step_time only.",
    ),
    Family(
        "tracefit_drift_gain_ratio",
        "gauge",
        _TARGET,
        "New time divided by old time at the last change of speed; step_time only.",
    ),
    Family(
        "tracefit_engines_apart_ratio",
        "gauge",
        _TARGET,
        "Time of the engine that differs most by that of the others, for the same steps; absent of one engine.",
    ),
    Family(
        "tracefit_level_ratio",
        "gauge",
        (*_TARGET, "phase"),
        "Time of the last steps per time by coefficients and shape factors: decode (without prefill), prefill; 1 where "
        "no level predicts better. It tells of the seconds after tracefit_last_heard_timestamp_seconds.",
    ),
    Family(
        "tracefit_correction_active",
        "gauge",
        _TARGET,
        "1 while River's regression is in the published prediction, 0 while it would not help; absent without it.",
    ),
    Family(
        "tracefit_shaped_error_median_ratio",
        "gauge",
        _TARGET,
        "Median relative error of coefficients times shape factors, without level and correction: what a reader of a "
        "file computes.",
    ),
    Family(
        "tracefit_predictor_error_median_ratio",
        "gauge",
        _MODEL,
        "Median relative error of models that publish no coefficients, over the rows they see; step_time only.",
    ),
    Family(
        "tracefit_shape_factor_ratio",
        "gauge",
        (*_TARGET, "shape"),
        "Time of a step per time by the coefficients, by batch shape, the 16 with most rows; portable, step_time only.",
    ),
    Family(
        "tracefit_replicas_differing",
        "gauge",
        _TARGET,
        "Of a merged state, engines that differ from the others by more than 5 % and three errors; step_time only.",
    ),
    Family(
        "tracefit_replica_speed_ratio",
        "gauge",
        (*_TARGET, "instance"),
        "Of a merged state, an engine's time per time of the others, the 16 furthest from them; step_time only.",
    ),
    Family(
        "tracefit_replica_differs",
        "gauge",
        (*_TARGET, "instance"),
        "1 for each of those 16 that differs from the others by more than 5 % and three errors; step_time only.",
    ),
)
"""Every per-configuration family, most important first."""

PAGE_FAMILIES: tuple[Family, ...] = (
    Family("tracefit_snapshot_generation", "gauge", (), "Generation of the snapshot this page shows."),
    Family("tracefit_snapshot_created_timestamp_seconds", "gauge", (), "When that snapshot was made."),
    Family("tracefit_snapshot_configs", "gauge", (), "Configurations in the snapshot."),
    Family("tracefit_exposition_series", "gauge", (), "Series of the snapshot on this page."),
    Family("tracefit_exposition_series_capacity", "gauge", (), "Most series of the snapshot that a page may show."),
    Family("tracefit_exposition_series_withheld", "gauge", (), "Series withheld because the page is full."),
    Family(
        "tracefit_exposition_values_withheld",
        "gauge",
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
