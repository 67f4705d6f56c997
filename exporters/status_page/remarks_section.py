"""What senders could do better, seen by what they lose or send in vain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from exporters.status_page.advice import OTLP_PORT, SHARED_ID, Advice
from exporters.wording import count, escape
from online import Snapshot

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
