"""What a command leaves: a report for eyes, with a block per configuration and target, and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from collector.runtime import StartError
from exporters.snapshot_file import write_atomically
from exporters.wording import unit_text
from online import ConfigSnapshot, FeatureSnapshot, ModelSnapshot, Snapshot

_IDENTITY_SHOWN = ("model", "gpu", "tensor_parallel_size")


def lines(snapshot: Snapshot | None, models: tuple[str, ...] = ("portable",)) -> Iterator[str]:
    """The report, line by line; without coefficients, one line saying so."""
    if snapshot is None or not any(config.targets for config in snapshot.configs):
        yield "nothing learned yet"
        return
    for config in snapshot.configs:
        yield _headline(config)
        for name, target in sorted(config.targets.items(), key=lambda item: (item[0] != "step_time", item[0])):
            for model_name in models:
                model = target.models.get(model_name)
                if model is not None and model.features:
                    yield f"  {name}  ({target.vector}, {model_name}: {model.rows} rows{_error(model)})"
                    yield from (f"    {_coefficient(feature)}" for feature in model.features)


def _headline(config: ConfigSnapshot) -> str:
    known = [f"{key}={config.config[key]}" for key in _IDENTITY_SHOWN if key in config.config]
    return f"config {config.config_id}  {' '.join(known)}  telemetry={config.telemetry} engines={len(config.engines)}"


def _error(model: ModelSnapshot) -> str:
    error = "" if model.error is None else f", median error {model.error.median_ape:.1%}"
    shaped = model.shaped_error or model.prediction_error
    return error if shaped is None else f"{error}, with shape factors {shaped.median_ape:.1%}"


def _coefficient(feature: FeatureSnapshot) -> str:
    bar = "" if feature.stderr is None else f" ± {feature.stderr:.3g}"
    return f"{feature.name:<24}{feature.coefficient:>14.6g}{bar:<12} {unit_text(feature.unit):<12} {feature.status}"


def write_result(path: Path, data: bytes) -> None:
    """Write a file that was asked for; StartError if it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror}") from None
