"""What would help: a sentence per quality of telemetry and per ailment; what senders lose; what engines still hold.

The page and ``tracefit doctor`` give the same advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from exporters.wording import age, count, escape
from online import ConfigSnapshot, Snapshot


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


PLUGIN_REMEDIES: dict[str, Advice] = {
    "queue_full": Advice(
        "poor",
        "items were pushed out of the producer plugin's full queue (plugin.queue_full)",
        "Send where somebody listens, or let the queue hold more in the vLLM process:",
        ("TRACEFITVLLM_QUEUE_ITEMS=100000",),
    ),
    "export_failed": Advice(
        "poor",
        "items were refused by the receiver for good or for 90 s (plugin.export_failed)",
        "Look at the reasons for which exports are refused here, and at the plugin's endpoint:",
        ("TRACEFITVLLM_ENDPOINT=http://…:4317",),
    ),
    "open_requests": Advice(
        "fair",
        "requests beyond the 65,536 that the producer plugin follows at a time have no journey (plugin.open_requests)",
        "Let it follow fewer by sending fewer requests to one engine, or send no journeys:",
        ("TRACEFITVLLM_JOURNEYS=0",),
    ),
    "hook_error": Advice(
        "poor",
        "errors inside of the producer plugin; at five it takes itself off (plugin.hook_error)",
        "vLLM's log has the error; a plugin made for this version of vLLM may exist.",
    ),
}
_STEPLESS = ("requests", "metrics")
_CONFLICTS_MIN = 10
"""A process that is restarted again and again makes a few."""


class Remarks(NamedTuple):
    """What the receiving side saw."""

    foreign_scopes: tuple[str, ...] = ()
    plugin_losses: Mapping[str, float] = {}
    unbound_publishers: int = 0
    conflicting_steps: int = 0
    """Steps that fit no process of their engine: several send as one, and nothing tells them apart."""


def remarks_section(remarks: Remarks, snapshot: Snapshot | None, otlp_port: int = OTLP_PORT) -> str:
    """The section of the page; empty when there is nothing to say."""
    paragraphs = [
        _paragraph(f"{count(lost)} {PLUGIN_REMEDIES[reason].meaning}.", PLUGIN_REMEDIES[reason].for_port(otlp_port))
        for reason, lost in remarks.plugin_losses.items()
        if lost
    ]
    if remarks.foreign_scopes:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in remarks.foreign_scopes)
        paragraphs.append(f"<p>Spans of these scopes tell nothing of steps or requests and are left out: {names}.</p>")
    stepless = [] if snapshot is None else [config for config in snapshot.configs if config.telemetry in _STEPLESS]
    if remarks.unbound_publishers and stepless:
        paragraphs.append(
            f"<p>{count(remarks.unbound_publishers)} KV publishers belong to no engine that is known: their "
            "events say something of steps, and this vLLM sends none. They are not used. Put the tracefit "
            "producer plugin into the vLLM image (deploy/vllm-plugin); it sends KV events itself.</p>"
        )
    if remarks.conflicting_steps >= _CONFLICTS_MIN:
        paragraphs.append(
            _paragraph(
                f"{count(remarks.conflicting_steps)} steps contradict others of the same service.instance.id: several "
                "processes seem to send under one, and neither process.pid nor host.name tells them apart.",
                SHARED_ID,
            )
        )
    if not paragraphs:
        return ""
    return (
        '<section id="remarks" aria-labelledby="remarks-title" data-live><h2 id="remarks-title">Of the senders</h2>'
        f"{''.join(paragraphs)}</section>"
    )


def _paragraph(said: str, advice: Advice) -> str:
    flags = "".join(f" <code>{escape(flag)}</code>" for flag in advice.flags)
    return f"<p>{escape(said)} {escape(advice.remedy)}{flags}</p>"


MAX_SHOWN = 12

REASONS: dict[str, str] = {
    "context": "whether journeys will come, which tell the decode context",
    "scheduling": "end stamps, which tell how the engine schedules",
    "first_steps": "more steps: the first ones of an engine process wait for each other",
    "next_steps": "more steps: rows of a few are made with those of the next ones",
    "journeys": "requests that have not ended, or whose spans have not come",
    "late_spans": "steps without a summary, which may still come",
    "kv_events": "KV events, which come later than their steps",
    "requests": "requests that may overlap, or their API spans",
    "turn": "rows of other engines that may end before",
}


class EngineWaiting(NamedTuple):
    """One engine; ``reason`` of the first that waits, ``silent_s`` since anything was heard of it."""

    engine: str
    steps: int
    requests: int
    rows: int
    reason: str
    silent_s: float


def waiting_section(waiting: Sequence[EngineWaiting], *, learned: bool) -> str:
    """The section of the page; empty when nothing waits. ``learned``: coefficients stand above."""
    if not waiting:
        return ""
    shown = sorted(waiting, key=lambda one: -(one.steps + one.requests + one.rows))[:MAX_SHOWN]
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(one.engine)}</code></th><td class="num">{count(one.steps)}</td>'
        f'<td class="num">{count(one.requests)}</td><td class="num">{count(one.rows)}</td>'
        f'<td>{escape(REASONS.get(one.reason, one.reason))}</td><td class="num">{age(one.silent_s)}</td></tr>'
        for one in shown
    )
    heads = "".join(f'<th scope="col" class="num">{head}</th>' for head in ("steps", "requests", "rows"))
    hidden = len(waiting) - len(shown)
    more = f'<p class="quiet">{hidden} more engines.</p>' if hidden else ""
    title = "Not learned from yet" if learned else "Telemetry arrives, and none of it is complete yet"
    return (
        f'<section id="waiting" aria-labelledby="waiting-title" data-live><h2 id="waiting-title">{title}</h2>'
        '<p class="quiet">What waits is published when it is complete, or when nothing has been heard of its engine '
        "for join.grace_s.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Engines that wait"><table class="flows">'
        f'<thead><tr><th scope="col">engine</th>{heads}<th scope="col">waits for</th>'
        f'<th scope="col" class="num">silent</th></tr></thead><tbody>{rows}</tbody></table></div>{more}</section>'
    )
