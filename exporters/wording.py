"""Numbers, names, units, statuses and advice in words: as people read them, and as Prometheus wants them.

The page and ``tracefit doctor`` give the same advice: a sentence per quality of telemetry and per ailment. For
Prometheus a coefficient in ``us/token`` leaves as ``seconds_per_token``, divided by 1e6: a product with 1e-6, which is
no binary fraction, would print noise digits.
"""

from __future__ import annotations

import datetime as dt
import math
from typing import Final, NamedTuple

from exporters.questions import duration, significant
from online import ConfigSnapshot

MAX_LABEL_CHARS = 120
"""Longer values are cut; Prometheus' usual ``label_value_length_limit`` is 200 bytes and up."""

US_PER_S = 1e6
Z_95 = 1.96
"""Standard errors of half a 95 % interval of a normal distribution."""

REASONS: dict[str, str] = {
    "few_rows": "too few rows so far",
    "collinear": "it moves together with other features: only their sum is known; vary the load",
    "one_size": "its feature came in one size only",
    "wide": "its error bar is too wide, ± 40 % or more",
    "clock_grain": "the clock of the telemetry is too coarse for these steps",
    "two_speeds": "the engines run at two speeds",
    "poor_fit": "half of the predictions are off by more than 15 %",
    "hidden_prefix_hits": "of a prompt token, cached or computed: the telemetry hides prefix-cache hits",
    "sampled": "some requests send no span, so a part of every batch is missing",
    "uncounted": "no page counts the requests, so nobody knows whether all of them send a span",
    "derived": "worked out from other times, by no regression of its own",
}
"""Why a coefficient should not be used alone, in words; the keys are ``online.snapshot.Reason``."""


def printable(text: str, max_chars: int = MAX_LABEL_CHARS) -> str:
    """Make whatever telemetry said one line of encodable text, cut where it is too long, and so a harmless label."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text[:max_chars])


def base_unit(unit: str) -> tuple[str, float]:
    """The base unit of a feature set's unit, as a label, and the divisor that brings a coefficient to it."""
    if unit == RATIO:
        return "ratio", 1.0
    words = unit.lower().replace("us", "seconds", 1).replace("^2", "_squared")
    return words.replace("/", "_per_").replace("*", "_per_"), US_PER_S


RATIO = "us/us"
"""Unit of a coefficient whose feature is a time, too."""

STEP_TIME = "step_time"
"""The target that most is said of."""
TARGETS = {
    STEP_TIME: ("Step time", "one turn of vLLM's busy loop"),
    "schedule_time": ("Scheduler time", "inside of schedule(), a part of the step"),
    "gpu_time": ("GPU time", "what the GPU needs of a step, without the host's gaps"),
    "api_queueing": ("API to queue", "in the API server before the engine has the request"),
    "queue_wait": ("Wait in the queue", "queued in the engine until first scheduled"),
    "post_decode": ("After the last token", "from the last token to the end of the request in the API server"),
    "first_response": ("First token to response", "from the first token to the first chunk of a streamed answer"),
    "preemption_gap": ("Preemption to resume", "from preemption until it runs again"),
}
"""What people call a target, and what it is."""

FEATURE_NAMES = {
    "intercept": "every step",
    "prefill_tokens": "prefill token",
    "prefill_requests": "prefill request",
    "decode_context_tokens": "token of decode context",
    "requests": "request in the batch",
    "active_experts": "all experts",
    "prompt_tokens": "prompt token",
    "output_tokens": "output token",
    "waiting": "waiting request",
}
FEATURE_PLURALS = {
    "prefill_tokens": "prefill tokens",
    "decode_context_tokens": "tokens of decode context",
    "requests": "requests in the batch",
}


def coefficient(value: float, unit: str, *, like: float | None = None, digits: int = 3) -> str:
    """A coefficient with its unit: ``580 µs/token``, ``1.90 ×`` for a ratio; ``like`` as in :func:`duration`."""
    if unit == RATIO:
        return f"{significant(value, digits)} ×"
    return f"{duration(value, like=like, digits=digits)}{unit.removeprefix('us')}"


def estimate(value: float, stderr: float | None, unit: str) -> str:
    """A coefficient and half of its 95 % interval: ``15.2 ms ± 5.2 %``; not known where that is as large as itself."""
    half = Z_95 * (stderr or 0.0)
    if not half > 0.0:
        return coefficient(value, unit)
    if value == 0.0:
        return f"0, at most {coefficient(half, unit, digits=2)}"
    return NOT_KNOWN if half >= abs(value) else f"{coefficient(value, unit)} ± {percent(half / abs(value))}"


NOT_KNOWN = "not known"


def spread(low: float, high: float) -> str:
    """``−7.0 % to +14 %``: a band of ratios, as what differs from one."""
    return " to ".join(f"{'−' if ratio < 1.0 else '+'}{percent(abs(ratio - 1.0))}" for ratio in (low, high))


def percent(ratio: float) -> str:
    """A ratio in per cent, with a decimal below ten, and with a digit that is not 0."""
    value = ratio * 100
    if not math.isfinite(value):
        return "unknown"
    if abs(value) < 0.05:  # noqa: PLR2004 - one decimal would be a 0
        return f"{significant(value, 1)} %"
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:,.0f} %"  # noqa: PLR2004 - where rounding gives two digits


def age(seconds: float) -> str:
    """How long ago, roughly."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count(value: float) -> str:
    """A whole number with thin groups."""
    return f"{value:,.0f}"


REPLICAS_SHOWN = 16
"""Engines that are named; a snapshot has those first that are furthest from the others."""


def name_of(config: ConfigSnapshot) -> str:
    """The name of its model, else its id; on one line, whatever telemetry said."""
    return printable(str(config.config.get("model") or config.config_id))


LOSSES: dict[str, str] = {
    "idle": "no request ran in between",
    "incomplete": "a step in between is missing",
    "warm_up": "first steps of a process, far slower than others",
    "too_long": "longer than any step",
    "time_order": "stamps that go backwards",
    "restart": "the engine was restarted in between",
    "learned_before": "learned before the sidecar was restarted",
    "ambiguous": "of engines or servers that look alike",
    "known_from_steps": "known from richer telemetry of their engine",
    "sampled_spans": "of spans that are sampled",
    "unknown_scope": "of no step or request of an engine",
    "duplicate": "sent twice",
    "invalid": "with a value that cannot be",
    "late": "later than allowed_lateness_s",
    "missing_attribute": "without an attribute that every step or request has",
    "lacks_e2e": "without gen_ai.latency.e2e",
    "lacks_first_token": "without gen_ai.latency.time_to_first_token",
    "lacks_input_tokens": "without gen_ai.usage.prompt_tokens or gen_ai.usage.input_tokens",
    "lacks_output_tokens": "without gen_ai.usage.completion_tokens or gen_ai.usage.output_tokens",
    "out_of_range": "with a number out of its range",
    "not_positive": "took no time by their clock",
    "unknown_feature": "a feature is not known (decode context of steps: set vllm.block_size, or trace journeys)",
    "limit_exceeded": "of a configuration beyond engines_max",
    "memory": "memory_limit_mib was reached",
    "log": "the log was full, or could not be written",
    "unauthenticated": "without a token that is accepted",
    "missing_families": "a family of counters is missing",
}
"""Why something was left out, in words, by the reasons that count it; another reason is its own word."""


def reason_text(reason: str) -> str:
    """A reason of a counter in words."""
    return LOSSES.get(reason, reason.replace("_", " "))


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
EVENT_LIMIT: Final = "OTEL_SPAN_EVENT_COUNT_LIMIT=20000"
"""Of the environment of vLLM: by default its SDK drops all but the newest 128 events of a span."""

QUALITY: dict[str, Advice] = {
    "fpm": Advice("good", "Every forward pass, with exact context."),
    "steps+": Advice("good", "Every step, with exact context and start and end stamps."),
    "steps": Advice("good", "Every step of the scheduler."),
    "sampled": Advice(
        "fair",
        "Some steps do not arrive; the gaps are rebuilt from request journeys.",
        "Trace every step, and let spans hold their events:",
        ("--step-tracing-sample-rate 1.0", EVENT_LIMIT),
    ),
    "journeys": Advice(
        "fair",
        "Request journeys only; the batch of each step is rebuilt from their stamps.",
        "Switch on step tracing:",
        ("--step-tracing-enabled", "--step-tracing-sample-rate 1.0", EVENT_LIMIT),
    ),
    "requests": Advice(
        "fair",
        "One span per request, no steps: coefficients settle slowly.",
        "Put the tracefit producer plugin into the vLLM image (deploy/vllm-plugin).",
    ),
    "metrics": Advice(
        "fair",
        "The server's own page of counters: predictions nearly as good as from steps, single coefficients less so.",
        "To separate the coefficients, put the tracefit producer plugin into the vLLM image (deploy/vllm-plugin).",
    ),
    "merged": Advice("good", "What several servers' states have learned, merged."),
}

NOTHING_YET = Advice(
    "poor",
    "No telemetry has been learned from.",
    "Name a server to scrape (tracefit run --scrape http://host:8000/metrics), and for more point vLLM here, too:",
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
    "Several processes send under one service.instance.id; only their pid differs, which a restart changes.",
    "Give each its own, for instance the pod's name and the data-parallel rank:",
    ("OTEL_RESOURCE_ATTRIBUTES=service.instance.id=…",),
)

UNKNOWN_MODEL = Advice(
    "fair",
    "The model is unknown, so each engine is a configuration of its own.",
    "Name it to vLLM's exporter:",
    ('OTEL_RESOURCE_ATTRIBUTES="vllm.model=…,hw.gpu.name=…"',),
)

ALPHA_INCOMPLETE = "Time outside the steps (alpha) is incomplete."

STATUS: dict[str, str] = {
    "identified": "the data pin it down",
    "weak": "there is too little evidence for it alone; its reason says why",
    "at_bound": "zero, because a cost cannot be negative",
    "prior_only": "taken from a donor or a data sheet; no evidence yet",
    "constant": "its feature has not varied",
}


def advice_for(config: ConfigSnapshot) -> list[Advice]:
    """Advice on one configuration, most important first; never empty."""
    paragraphs = [QUALITY.get(config.telemetry, NOTHING_YET)]
    if "model" not in config.config:
        paragraphs.append(UNKNOWN_MODEL)
    if any(engine.instance.endswith(")") and " (pid " in engine.instance for engine in config.engines):
        paragraphs.append(SHARED_ID)
    untimed_steps = config.telemetry in ("steps", "sampled") and STEP_TIME not in config.targets
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
    remedy = "The API server's spans of 20 requests complete it; where none come, let it send them:"
    return Advice("fair", ALPHA_INCOMPLETE, remedy, NOTHING_YET.flags)


def pending_sentence(senders: int, steps: int, requests: int, rows: int, until_unix_ns: int) -> str:
    """What engines and API processes sent and is not learned yet, and when (unix ns) it is if nothing more comes."""
    parts = ((steps, "step"), (requests, "request"), (rows, "row"))
    held = ", ".join(f"{count(number)} {name}{'s' * (number != 1)}" for number, name in parts if number)
    until = dt.datetime.fromtimestamp(until_unix_ns // 10**9, dt.UTC)
    return (
        f"{held} of {count(senders)} sender{'s' * (senders != 1)}, not learned yet: they wait for older ones of other "
        "senders, or for the steps or spans that belong to them. If nothing more comes, they are learned as they are, "
        f"at {until:%H:%M:%S} UTC at the latest."
    )
