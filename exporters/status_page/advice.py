"""What to switch on to learn more: one sentence per quality of telemetry, and one per ailment."""

from __future__ import annotations

from typing import NamedTuple

from online import ConfigSnapshot


class Advice(NamedTuple):
    """``level`` is good, fair or poor; ``flags`` are typed by the user as they stand."""

    level: str
    meaning: str
    remedy: str = ""
    flags: tuple[str, ...] = ()


QUALITY: dict[str, Advice] = {
    "steps+": Advice("good", "Every step, with exact context and start and end stamps."),
    "steps": Advice("good", "Every step of the scheduler."),
    "sampled": Advice(
        "fair",
        "Some steps; gaps are rebuilt from request journeys.",
        "Trace every step, and let spans hold their events:",
        ("--step-tracing-sample-rate 1.0", "OTEL_SPAN_EVENT_COUNT_LIMIT=20000"),
    ),
    "journeys": Advice(
        "fair",
        "Request journeys only; the batch of each step is rebuilt from their stamps.",
        "Switch on step tracing:",
        ("--step-tracing-enabled", "--step-tracing-sample-rate 1.0", "OTEL_SPAN_EVENT_COUNT_LIMIT=20000"),
    ),
    "requests": Advice(
        "poor",
        "One span per request, no steps: coefficients settle slowly.",
        "Put the tracefit producer plugin into the vLLM image (deploy/vllm-plugin), or run a vLLM with step tracing:",
        ("--step-tracing-enabled", "--enable-journey-tracing"),
    ),
}

NOTHING_YET = Advice(
    "poor",
    "No telemetry has been learned from.",
    "Point vLLM at this sidecar:",
    ("--otlp-traces-endpoint http://127.0.0.1:4317",),
)

STATUS: dict[str, str] = {
    "identified": "the data pin it down",
    "weak": "the data hardly tell it from the others; vary the load",
    "at_bound": "zero, because a cost cannot be negative",
    "prior_only": "taken from a donor or a data sheet; no evidence yet",
    "constant": "its feature has not varied",
}


def advice_for(config: ConfigSnapshot) -> list[Advice]:
    """Advice on one configuration, most important first; never empty."""
    paragraphs = [QUALITY.get(config.telemetry, NOTHING_YET)]
    if "model" not in config.config:
        paragraphs.append(
            Advice(
                "fair",
                "The model is unknown, so each engine is a configuration of its own.",
                "Name it to vLLM's exporter:",
                ('OTEL_RESOURCE_ATTRIBUTES="vllm.model=…,hw.gpu.name=…"',),
            )
        )
    if config.targets and "post_decode" not in config.targets:
        paragraphs.append(
            Advice(
                "fair",
                "Time outside the steps (alpha) is incomplete.",
                "Trace journeys:",
                ("--enable-journey-tracing",),
            )
        )
    return paragraphs
