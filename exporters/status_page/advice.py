"""What to switch on to learn more: one sentence per quality of telemetry, and one per ailment."""

from __future__ import annotations

from typing import Final, NamedTuple

from online import ConfigSnapshot


class Advice(NamedTuple):
    """``level`` is good, fair or poor; ``flags`` are typed by the user as they stand."""

    level: str
    meaning: str
    remedy: str = ""
    flags: tuple[str, ...] = ()

    def for_port(self, otlp_port: int) -> Advice:
        """The same, for a sidecar that takes OTLP over gRPC on this port."""
        return self._replace(flags=tuple(flag.replace(f":{OTLP_PORT}", f":{otlp_port}") for flag in self.flags))


OTLP_PORT: Final = 4317
"""In the flags below; the port of OTLP over gRPC unless another one is configured."""

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
        "Put the tracefit producer plugin into the vLLM image (deploy/vllm-plugin).",
    ),
    "metrics": Advice(
        "fair",
        "The server's own page of counters: predictions nearly as good as from steps, single coefficients less so.",
        "To tell the coefficients apart, put the tracefit producer plugin into the vLLM image (deploy/vllm-plugin).",
    ),
    "merged": Advice("good", "What several servers' states have learned, merged."),
}

NOTHING_YET = Advice(
    "poor",
    "No telemetry has been learned from.",
    "Name a server to scrape (tracefit run --scrape http://host:8000/metrics), or point vLLM at this sidecar:",
    (f"--otlp-traces-endpoint http://127.0.0.1:{OTLP_PORT}",),
)

NO_CONTEXT = Advice(
    "poor",
    "No step times yet: without a block size or journeys the decode context of a step cannot be known.",
    "Set vllm.block_size, or trace journeys:",
    ('OTEL_RESOURCE_ATTRIBUTES="vllm.block_size=…"',),
)

SHARED_ID = Advice(
    "fair",
    "Several processes send under one service.instance.id; they are told apart by their pid, which a restart changes.",
    "Give each its own, for instance the pod's name and the data-parallel rank:",
    ("OTEL_RESOURCE_ATTRIBUTES=service.instance.id=…",),
)

ALPHA_INCOMPLETE = "Time outside the steps (alpha) is incomplete."

STATUS: dict[str, str] = {
    "identified": "the data pin it down",
    "weak": "the data hardly tell it from the others; vary the load",
    "at_bound": "zero, because a cost cannot be negative",
    "prior_only": "taken from a donor or a data sheet; no evidence yet",
    "constant": "its feature has not varied",
    "unidentified": "it trades with the others; only the prediction is of use",
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
    if any(engine.instance.endswith(")") and " (pid " in engine.instance for engine in config.engines):
        paragraphs.append(SHARED_ID)
    untimed_steps = config.telemetry in ("steps", "sampled") and "step_time" not in config.targets
    if config.targets and untimed_steps and "block_size" not in config.config:
        paragraphs.append(NO_CONTEXT)
    alpha = _alpha_advice(config)
    return [*paragraphs, alpha] if alpha is not None else paragraphs


def _alpha_advice(config: ConfigSnapshot) -> Advice | None:
    """What would complete the times outside the steps; a flag only where the vLLM that sends this knows it."""
    if not config.targets or "post_decode" in config.targets or config.telemetry in ("requests", "merged"):
        return None
    if config.telemetry in ("steps", "sampled", "journeys"):
        return Advice("fair", ALPHA_INCOMPLETE, "Trace journeys:", ("--enable-journey-tracing",))
    if "api_queueing" in config.targets:
        return None
    return Advice("fair", ALPHA_INCOMPLETE, "Let the API server send its spans, too:", NOTHING_YET.flags)
