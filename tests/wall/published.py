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
BETA_SIGMAS, STDERR_SHARE = 0.3, 0.10
"""How far a coefficient may move, in its standard errors; a standard error, as a share of itself."""
FLOOR = 1e-3
"""No coefficient is held to less than a thousandth of itself, whatever its standard error."""
TOLERANCES = {
    "rows": (0.005, 0.0),
    "effective_rows": (0.05, 0.0),
    "mean_stderr": (STDERR_SHARE, 0.0),
    "error": (0.01, 0.003),
    "prediction_error": (0.01, 0.003),
    "interval": (0.02, 0.02),
    "factors": (0.03, 0.0),
    "gain": (0.03, 0.0),
    "mean_us": (1e-3, 0.0),
    "mean_factor": (0.003, 0.0),
}
"""How far any other number may move: as a share of it, or by so much, whichever is more."""


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
    return list(_differ((), now, golden))


def _differ(place: tuple[str, ...], new: Any, old: Any) -> Iterator[str]:
    """Of trees: same names at each branch, numbers as near as their name asks for, all else equal."""
    where = " ".join(place)
    if isinstance(new, dict) and isinstance(old, dict):
        if new.keys() != old.keys():
            yield f"{where}: {sorted(new)} for {sorted(old)}"
        for name in new.keys() & old.keys():
            yield from _differ((*place, name), new[name], old[name])
    elif "features" in place[-2:-1] and isinstance(new, list):
        yield from _feature_differs(where, new, old)
    elif type(new) is list and len(new) == len(old):
        for each in zip(new, old, strict=True):
            yield from _differ(place, *each)
    elif (type(new) is float and type(old) is float) or place[-1] == "rows":
        share, least = TOLERANCES.get(place[-1], TOLERANCES.get(place[-2], (0.0, 0.0)))
        yield from _far(where, new, old, share, least)
    elif new != old:
        yield f"{where}: {new} for {old}"


def _feature_differs(where: str, new: list[Any], old: list[Any]) -> Iterator[str]:
    (value, stderr, status), (was, sigma, expected) = new, old
    yield from _far(where, value, was, FLOOR, BETA_SIGMAS * (sigma or 0.0))
    if (stderr is None) != (sigma is None) or status != expected:
        yield f"{where}: {stderr} {status} for {sigma} {expected}"
    elif sigma is not None:
        yield from _far(f"{where} stderr", stderr, sigma, STDERR_SHARE)


def _far(where: str, new: float, old: float, share: float, least: float = 0.0) -> Iterator[str]:
    if abs(new - old) > max(share * abs(old), least) + 1e-12:
        yield f"{where}: {new:.6g} for {old:.6g}"
