"""Coefficients as BLIS reads them: the flags of a command line, or a file with everything about them in comments."""

from __future__ import annotations

from typing import NamedTuple

from exporters.wording import printable
from online import ConfigSnapshot, Snapshot

MAX_COMMENT_CHARS = 400


class Coefficients(NamedTuple):
    """What BLIS loads, and what a reader should know about it."""

    alpha: tuple[int, int, int]
    beta: tuple[float, ...]
    kv_us_per_token: float
    doubtful: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...] = ()


def render_flags(coefficients: Coefficients) -> bytes:
    """The flags of ``blis run`` and ``blis replay``: coefficients and the engine's limits, as far as they are known.

    Giving both kinds of coefficients selects the trained-physics backend by itself.
    """
    alpha = ",".join(map(str, coefficients.alpha))
    beta = ",".join(map(_number, coefficients.beta))
    return f"--alpha-coeffs {alpha} --beta-coeffs {beta}{_flags(coefficients)}\n".encode()


def _flags(coefficients: Coefficients) -> str:
    return "".join(f" --{name} {value}" for name, value in coefficients.limits)


def render_yaml(snapshot: Snapshot, config: ConfigSnapshot, coefficients: Coefficients) -> bytes:
    """A file for ``--defaults-filepath``.

    BLIS refuses unknown keys, so everything about the numbers stands in comments.
    """
    facts = (f"{key}: {value}" for key, value in sorted(config.config.items()))
    step = config.targets["step_time"]
    model = step.models["portable"]
    head = [
        f"tracefit {snapshot.tracefit_version}, snapshot generation {snapshot.generation}",
        f"created_unix_nano {snapshot.created_unix_nano}, config {config.config_id}, telemetry {config.telemetry}",
        *facts,
        f"step_time rows {model.rows}, effective rows {model.effective_rows:.1f}",
    ]
    head.append(f"kv_us_per_token {coefficients.kv_us_per_token!r} (BLIS's formula and figures)")
    if model.error is not None:
        head.append(f"step_time median error {model.error.median_ape:.4f}, p90 {model.error.p90_ape:.4f}")
    head.extend((*coefficients.doubtful, *coefficients.notes))
    if coefficients.limits:
        head.append(f"flags that belong to it:{_flags(coefficients)}")
    head.append("pass --model-config-folder and --hardware-config: BLIS looks for them beside this file otherwise")
    lines = [f"# {printable(line, MAX_COMMENT_CHARS)}" for line in head]
    lines += [
        "version: 0.0.1",
        "defaults: {}",
        "workloads: {}",
        "trained_physics_coefficients:",
        f"  alpha_coeffs: [{', '.join(map(str, coefficients.alpha))}]",
        f"  beta_coeffs: [{', '.join(map(_number, coefficients.beta))}]",
    ]
    return ("\n".join(lines) + "\n").encode()


def _number(value: float) -> str:
    """Shortest text that reads back as the same number, with the dot that YAML 1.1 readers ask for."""
    text = repr(float(value))
    mantissa, e, exponent = text.partition("e")
    if e and "." not in mantissa:
        return f"{mantissa}.0e{exponent}"
    return "0" if text == "0.0" else text
