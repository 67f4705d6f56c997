"""Queue and loss accounting, from our own metrics as they stand at this moment.

Nothing is listed by hand: a gauge whose name has ``capacity`` and its twin with ``size`` are a meter; a counter whose
name has one of ``LOSSES`` is a way of losing something; other counters are flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from exporters.charts import meter
from exporters.wording import count, escape

PREFIX = "tracefit_"
LOSSES = ("refused", "failed", "skipped", "dropped", "evicted", "errors", "late", "lost", "rejected", "withheld")


class Flow(NamedTuple):
    """A counter family: its total, and the parts that are not zero."""

    name: str
    help: str
    total: float
    parts: tuple[tuple[str, float], ...]


class Meter(NamedTuple):
    """How full one bounded thing is."""

    name: str
    help: str
    size: float
    capacity: float


class Accounting(NamedTuple):
    """Everything the page shows of our own metrics."""

    meters: tuple[Meter, ...]
    flows: tuple[Flow, ...]
    losses: tuple[Flow, ...]


def account(own: Collector) -> Accounting:
    """Sort our own metrics into meters, flows and losses."""
    families = [family for family in own.collect() if family.name.startswith(PREFIX)]
    gauges = {family.name: family for family in families if family.type == "gauge"}
    flows = [_flow(family) for family in families if family.type == "counter"]
    return Accounting(
        tuple(_meters(gauges)),
        tuple(flow for flow in flows if not _is_loss(flow.name)),
        tuple(flow for flow in flows if _is_loss(flow.name)),
    )


def _is_loss(name: str) -> bool:
    return any(word in LOSSES for word in name.split("_"))


def _flow(family: Metric) -> Flow:
    samples = [sample for sample in family.samples if sample.name.endswith("_total")]
    parts = tuple((_labels(sample), sample.value) for sample in samples if sample.labels and sample.value)
    return Flow(family.name, family.documentation, sum(sample.value for sample in samples), parts)


def _labels(sample: Sample) -> str:
    return ", ".join(sample.labels.values())


def _meters(gauges: dict[str, Metric]) -> Iterable[Meter]:
    for name, family in sorted(gauges.items()):
        twin = gauges.get(name.replace("capacity", "size"))
        if "capacity" in name and twin is not None:
            yield Meter(twin.name, twin.documentation, _value(twin), _value(family))


def _value(family: Metric) -> float:
    return sum(sample.value for sample in family.samples)


def accounting_section(own: Collector) -> str:
    """The section of the page."""
    sums = account(own)
    lost = [flow for flow in sums.losses if flow.total]
    quiet = [flow for flow in sums.losses if not flow.total]
    verdict = "Nothing was lost or left out." if not lost else "Some telemetry was left out; each reason is counted."
    parts = [
        '<section id="accounting" aria-labelledby="accounting-title" data-live>',
        '<h2 id="accounting-title">Queue and losses</h2>',
        f'<p class="verdict {"some" if lost else "none"}">{verdict}</p>',
        _meter_table(sums.meters),
        _flow_table("Left out", lost),
        _flow_table("Flow", [flow for flow in sums.flows if flow.total]),
    ]
    if quiet:
        names = "".join(f"<li><code>{escape(flow.name)}</code> {escape(flow.help)}</li>" for flow in quiet)
        parts.append(
            f'<details id="accounting-zero"><summary>{len(quiet)} kinds of loss that did not happen</summary>'
            f"<ul>{names}</ul></details>"
        )
    parts.append("</section>")
    return "".join(parts)


def _meter_table(meters: Iterable[Meter]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(m.name.removeprefix(PREFIX))}</code></th>'
        f'<td class="num">{count(m.size)}</td><td>{meter(m.size, m.capacity, m.help)}</td>'
        f'<td class="quiet">of {count(m.capacity)}. {escape(m.help)}</td></tr>'
        for m in meters
    )
    return f'<table class="flows"><caption>Bounds</caption><tbody>{rows}</tbody></table>' if rows else ""


def _flow_table(caption: str, flows: Iterable[Flow]) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(flow.name.removeprefix(PREFIX))}</code></th>'
        f'<td class="num">{count(flow.total)}</td><td>{_parts(flow)}</td>'
        f'<td class="quiet">{escape(flow.help)}</td></tr>'
        for flow in flows
    )
    return f'<table class="flows"><caption>{caption}</caption><tbody>{rows}</tbody></table>' if rows else ""


def _parts(flow: Flow) -> str:
    return " ".join(f'<span class="part">{escape(name)} {count(value)}</span>' for name, value in flow.parts[:24])
