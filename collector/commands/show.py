"""``tracefit show``: a snapshot for eyes, as the status page shows it."""

from __future__ import annotations

from collections.abc import Iterator

from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine
from exporters.what_if import as_json
from exporters.wording import unit_text
from tracefit import Coefficient, Config, Model, NotFoundError, Snapshot, Target

from .answers import counted, duration, headline, refusal

_STEP_TIME = "step_time"
_FACTORS_SHOWN = 8


def show(snapshot: Snapshot, *, which: str, in_json: bool, say: PrintLine, note: PrintLine) -> int:
    """Print every configuration, or one; failed if none has coefficients that may be used."""
    try:
        configs = (snapshot.config(which),) if which else snapshot.configs
    except NotFoundError as error:
        note(refusal(error))
        return EXIT_FAILED
    if in_json:
        say(as_json({"generation": snapshot.generation, "configs": [_tree(each) for each in configs]}))
    else:
        say(f"generation {snapshot.generation}, {counted(len(snapshot.configs), 'configuration')}")
        for config in configs:
            for line in _config_lines(config):
                say(line)
    return EXIT_OK if any(config.usable for config in configs) else EXIT_FAILED


def _config_lines(config: Config) -> Iterator[str]:
    yield ""
    yield f"{headline(config)}  telemetry {config.telemetry}, {counted(config.engines, 'engine')}"
    limits = ", ".join(f"{name} {value:,}" for name, value in config.limits._asdict().items() if value is not None)
    if limits:
        yield f"  limits    {limits}"
    yield f"  verdict   {'usable' if config.usable else '; '.join(config.reasons)}"
    for name, target in sorted(config.targets.items(), key=lambda item: (item[0] != _STEP_TIME, item[0])):
        for model in _published(target):
            yield from _target_lines(name, target, model)


def _published(target: Target) -> list[Model]:
    """The portable model, or whichever has coefficients."""
    listed = [model for model in target.models.values() if model.coefficients]
    return [model for model in listed if model.name == "portable"] or listed[:1]


def _target_lines(name: str, target: Target, model: Model) -> Iterator[str]:
    error = "" if model.median_ape is None else f", median error {model.median_ape:.1%}"
    usual = "" if target.mean_us is None else f", {duration(target.mean_us)} on average"
    yield f"  {name}  ({model.name}: {model.rows:,} rows{error}{usual})"
    for each in model.coefficients:
        yield f"    {_coefficient(each)}"
    if target.in_flight is not None:
        usual_requests, per_request_us = target.in_flight
        yield f"    {duration(per_request_us)} more with each request in flight beyond {usual_requests:,.0f}"
    if target.interval is not None:
        low, high = target.interval.pooled
        yield f"    8 of 10 within {low:.2f} to {high:.2f} of the prediction"
    far = sorted(target.factors.items(), key=lambda item: -abs(item[1] - 1.0))[:_FACTORS_SHOWN]
    if far and not target.factors_applied:
        yield f"    shapes    {len(target.factors)}, factors not applied: they would predict worse than none"
    elif far:
        yield "    shapes    " + ", ".join(f"{cell} x{factor:.2f}" for cell, factor in far)


def _coefficient(each: Coefficient) -> str:
    reason = f", {each.reason.replace('_', ' ')}" if each.reason else ""
    bar = "" if each.stderr is None else f" ± {each.stderr:.3g}"
    return f"{each.name:<24}{each.value:>14,.6g}{bar:<12} {unit_text(each.unit):<12} {each.status}{reason}"


def _tree(config: Config) -> dict[str, object]:
    return {
        "config_id": config.config_id,
        "config": dict(config.facts),
        "usable": config.usable,
        "reasons": list(config.reasons),
        "limits": config.limits._asdict(),
        "targets": {
            name: {
                "model": model.name,
                "rows": model.rows,
                "median_ape": model.median_ape,
                "coefficients": [each._asdict() for each in model.coefficients],
                "in_flight": None if target.in_flight is None else target.in_flight._asdict(),
            }
            for name, target in config.targets.items()
            for model in _published(target)
        },
    }
