"""What a user sees of a recording: ``tracefit replay`` of it, the snapshot it writes, and how two of these compare."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collector.cli import main

SHAPES_SHOWN = 12
"""Shape factors that are compared of each target: those with the most rows."""
BETA_SIGMAS, STDERR_SHARE, ERROR_POINTS = 0.3, 0.10, 0.003
"""How far a coefficient may move, in its standard errors; a standard error, as a share; an error, as a ratio."""
ROWS_SHARE, EFFECTIVE_SHARE, FACTOR_SHARE, RATIO = 0.005, 0.05, 0.03, 0.02
FLOOR = 1e-3
"""No coefficient is held to less than a thousandth of itself, whatever its standard error."""


def replay(out: Path, *files: Path, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """The snapshot that ``tracefit replay`` writes of these files."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = main(["replay", *map(str, files), "--snapshot", str(out), *options])
    assert code == 0, files
    snapshot: dict[str, Any] = json.loads(out.read_bytes())
    return snapshot


def essence(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a snapshot that a user reads, by configuration and target."""
    return {
        f"{number} {config['telemetry']}": {
            "engines": len(config["engines"]),
            "doubts": config.get("doubts", []),
            "targets": {name: _target(target) for name, target in config["targets"].items()},
        }
        for number, config in enumerate(sorted(snapshot["configs"], key=_rank))
    }


def _rank(config: dict[str, Any]) -> tuple[str, int, str]:
    """An order that does not depend on an identity, which may be the instance."""
    rows = sum(model["rows"] for target in config["targets"].values() for model in target["models"].values())
    return config["telemetry"], -rows, config["config_id"]


def _target(target: dict[str, Any]) -> dict[str, Any]:
    factors = target.get("shape_factors", {})
    most = sorted(factors, key=lambda cell: (-factors[cell]["rows"], cell))[:SHAPES_SHOWN]
    interval = target.get("interval")
    drift = target.get("drift") or {}
    return {
        "models": {name: _model(model) for name, model in target["models"].items() if model["features"]},
        "factors": {cell: factors[cell]["factor"] for cell in most},
        "factors_applied": target.get("shape_factors_applied", True),
        "interval": [interval["p10"], interval["p90"]] if interval else None,
        "mean_us": target.get("mean_us"),
        "mean_factor": target.get("mean_factor"),
        "changes": drift.get("count", 0),
        "gain": drift.get("gain"),
    }


def _model(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": model["rows"],
        "effective_rows": model["effective_rows"],
        "error": (model.get("error") or {}).get("mape"),
        "prediction_error": (model.get("prediction_error") or {}).get("median_ape"),
        "features": {
            each["name"]: [
                each["coefficient"],
                each.get("stderr"),
                " ".join(filter(None, [each["status"], each.get("reason")])),
            ]
            for each in model["features"]
        },
        "mean_stderr": _mean_stderr(model),
    }


def _mean_stderr(model: dict[str, Any]) -> float | None:
    """Standard error of the mean of what the model says, sqrt(x' C x) of the mean features x."""
    x, rows = [each.get("mean") for each in model["features"]], model.get("covariance", [])
    if not rows or None in x:
        return None
    return sum(x[i] * x[j] * value for i, row in enumerate(rows) for j, value in enumerate(row)) ** 0.5


def differences(now: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """Where what is published now differs by more than the tolerances; empty where a user would see the same."""
    return list(_differ(now, golden))


def _differ(now: dict[str, Any], golden: dict[str, Any]) -> Iterator[str]:
    if now.keys() != golden.keys():
        yield f"configurations: {sorted(now)} for {sorted(golden)}"
    for config in now.keys() & golden.keys():
        new, old = now[config], golden[config]
        for key in ("engines", "doubts"):
            if new[key] != old[key]:
                yield f"{config} {key}: {new[key]} for {old[key]}"
        if new["targets"].keys() != old["targets"].keys():
            yield f"{config} targets: {sorted(new['targets'])} for {sorted(old['targets'])}"
        for name in new["targets"].keys() & old["targets"].keys():
            for place in _target_differs(new["targets"][name], old["targets"][name]):
                yield f"{config} {name} {place}"


def _target_differs(new: dict[str, Any], old: dict[str, Any]) -> Iterator[str]:
    if new["models"].keys() != old["models"].keys():
        yield f"models: {sorted(new['models'])} for {sorted(old['models'])}"
    for name in new["models"].keys() & old["models"].keys():
        for place in _model_differs(new["models"][name], old["models"][name]):
            yield f"{name} {place}"
    for key in ("changes", "factors_applied"):
        if new[key] != old[key]:
            yield f"{key}: {new[key]} for {old[key]}"
    yield from _far("gain", new["gain"], old["gain"], FACTOR_SHARE)
    yield from _far("mean_us", new["mean_us"], old["mean_us"], 1e-3)
    yield from _far("mean_factor", new["mean_factor"], old["mean_factor"], ERROR_POINTS)
    if (new["interval"] is None) != (old["interval"] is None):
        yield f"interval: {new['interval']} for {old['interval']}"
    for p_new, p_old in zip(new["interval"] or (), old["interval"] or (), strict=True):
        if abs(p_new - p_old) > RATIO * max(1.0, p_old):
            yield f"interval: {p_new:.3f} for {p_old:.3f}"
    for cell in old["factors"]:
        yield from _far(f"factor {cell}", new["factors"].get(cell), old["factors"][cell], FACTOR_SHARE)


def _model_differs(new: dict[str, Any], old: dict[str, Any]) -> Iterator[str]:
    yield from _far("rows", new["rows"], old["rows"], ROWS_SHARE)
    yield from _far("effective_rows", new["effective_rows"], old["effective_rows"], EFFECTIVE_SHARE)
    for key in ("error", "prediction_error"):
        if (new[key] is None) != (old[key] is None):
            yield f"{key}: {new[key]} for {old[key]}"
        elif new[key] is not None and abs(new[key] - old[key]) > ERROR_POINTS * max(1.0, old[key] / 0.3):
            yield f"{key}: {new[key]:.4f} for {old[key]:.4f}"
    yield from _far("stderr of the mean", new["mean_stderr"], old["mean_stderr"], STDERR_SHARE)
    if new["features"].keys() != old["features"].keys():
        yield f"features: {sorted(new['features'])} for {sorted(old['features'])}"
    for name in new["features"].keys() & old["features"].keys():
        value, stderr, status = new["features"][name]
        was, sigma, expected = old["features"][name]
        if abs(value - was) > max(BETA_SIGMAS * (sigma or 0.0), FLOOR * abs(was)):
            yield f"{name}: {value:.6g} for {was:.6g} ± {sigma}"
        yield from _far(f"{name} stderr", stderr, sigma, STDERR_SHARE)
        if status != expected:
            yield f"{name} status: {status} for {expected}"


def _far(what: str, new: float | None, old: float | None, share: float) -> Iterator[str]:
    if (new is None) != (old is None):
        yield f"{what}: {new} for {old}"
    elif new is not None and old is not None and abs(new - old) > share * abs(old) + 1e-12:
        yield f"{what}: {new:.6g} for {old:.6g}"
