"""Our own metrics as one table: what exists, its type, unit, closed label values and meaning.

What becomes of a thing is one counter with a label, so that what came is the sum over it: spans and calls per
transport, spans and events of the decoder, messages, batches and events of the KV cache, rows. Coefficients are not
here: they are drawn from the snapshot by the exporter. The live objects are in collector/telemetry/metrics.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Self

from collector import __version__
from online import RowOutcome, Target

from .reasons import (
    REFUSALS,
    Asked,
    ForwardOutcome,
    JoinEvent,
    Outcome,
    PluginLoss,
    Restored,
    RowDrop,
    Signal,
    Skip,
    Stall,
    Transport,
)

PREFIX = "tracefit_"

OPEN: tuple[str, ...] = ()
"""Values of a label that come from outside; whoever sets such a metric bounds them."""


class Kind(enum.Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One line of the table; ``name`` is without the prefix, a counter's without ``_total``.

    A line is itself, like a member of an enum: counts are kept by it, and a copy of what holds counts copies no line.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    @property
    def exposed_name(self) -> str:
        """The name on the page."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


_C, _G = Kind.COUNTER, Kind.GAUGE
ACCEPTED = Outcome.ACCEPTED
DROPPED = "dropped"
_TRANSPORT = ("transport", tuple(Transport))
_ACCEPTED_OR_SKIPPED = (("outcome", (ACCEPTED, *Skip)),)

SPANS = Metric(
    "receiver_spans",
    _C,
    "spans",
    "Spans in exports that decoded, by what became of them; of what was refused the sender was told, unless it was"
    " passed on.",
    (_TRANSPORT, ("outcome", (ACCEPTED, *REFUSALS, Outcome.FAILED))),
)
REQUESTS = Metric(
    "receiver_requests", _C, "requests", "Export calls, by how they ended.", (_TRANSPORT, ("outcome", tuple(Outcome)))
)
FORWARDED = Metric(
    "forward_exports",
    _C,
    "exports",
    "Exports that were to be passed on, by what became of them.",
    (("signal", tuple(Signal)), ("outcome", tuple(ForwardOutcome))),
)
FORWARDED_SPANS = Metric("forward_spans", _C, "spans", "Spans in these exports.", (("outcome", tuple(ForwardOutcome)),))
SIZE_BYTES = Metric(
    "size_bytes",
    _G,
    "bytes",
    "Exports that are not learned from (queue), wait for the backend (forward), or are on disk (log).",
    (("of", ("queue", "forward", "log")),),
)
CAPACITY_BYTES = Metric(
    "capacity_bytes",
    _G,
    "bytes",
    "Most bytes of each, and of resident memory (memory) before exports are refused; 0 = no log, no limit.",
    (("of", ("queue", "forward", "log", "memory")),),
)
SIZE = Metric(
    "size",
    _G,
    "",
    "Engines or API processes, whichever are more; servers that are scraped; messages that wait for the worker; batches"
    " of KV events in the join.",
    (("of", ("engines", "servers", "kv", "fpm", "kv_batches")),),
)
CAPACITY = Metric(
    "capacity",
    _G,
    "",
    "Most engines, configurations, servers, and messages that may wait.",
    (("of", ("engines", "configs", "servers", "kv", "fpm")),),
)
NO_PLACE = Metric(
    "no_place",
    _G,
    "",
    "Engines and configurations without a place lately: raise engines_max.",
    (("of", ("engines", "configs")),),
)
WORKER_LAG = Metric(
    "worker_lag_seconds",
    _G,
    "seconds",
    "How long the oldest export of the last batch waited, or has waited where there was none to take.",
)
WORKER_FAILED_SPANS = Metric("worker_failed_spans", _C, "spans", "Acknowledged spans lost to an error of the worker.")
DECODED_SPANS = Metric(
    "decode_spans", _C, "spans", "Spans the worker looked at: understood, or left out by reason.", _ACCEPTED_OR_SKIPPED
)
DECODED_EVENTS = Metric(
    "decode_events", _C, "events", "Their events: understood, or left out by reason.", _ACCEPTED_OR_SKIPPED
)
SDK_DROPPED_EVENTS = Metric(
    "decode_sdk_dropped_events",
    _C,
    "events",
    "Events the sender's SDK dropped (raise OTEL_SPAN_EVENT_COUNT_LIMIT there), not the producer plugin's.",
)
PLUGIN_LOST = Metric(
    "plugin_lost_items",
    _C,
    "items",
    "What the producer plugin says it lost, by its own reasons; docs/telemetry.md has the remedies.",
    (("reason", tuple(PluginLoss)),),
)
DECODED_SUMMARIES = Metric(
    "decode_step_summaries",
    _C,
    "summaries",
    "Step summaries by the decoder that read them: in columns (fast), or one by one (plain).",
    (("decoder", ("columnar", "plain")),),
)
ROWS = Metric(
    "rows",
    _C,
    "rows",
    "Interval equations offered to the learners, by target and what became of them.",
    (("target", tuple(Target)), ("outcome", tuple(RowOutcome))),
)
DROPPED_ROWS = Metric(
    "join_dropped_rows", _C, "rows", "Intervals that gave no equation, by reason.", (("reason", tuple(RowDrop)),)
)
JOIN_EVENTS = Metric(
    "join_events", _C, "events", "What the join met besides rows, by kind.", (("event", tuple(JoinEvent)),)
)
PENDING = Metric(
    "join_pending",
    _G,
    "",
    "Steps, requests and rows that are not learned yet, of the 5 engines with most.",
    (("engine", OPEN), ("what", ("steps", "requests", "rows"))),
)
WATERMARK_AGE = Metric(
    "join_watermark_age_seconds", _G, "seconds", "How far published rows trail the newest event; the worst engine."
)
MESSAGES = Metric(
    "messages",
    _C,
    "messages",
    "ZMQ messages of KV events and ForwardPassMetrics: accepted, or left out by reason; dropped: accepted, and pushed"
    " out of the full queue.",
    (
        ("feed", ("kv", "fpm")),
        ("outcome", (ACCEPTED, Skip.FOREIGN, Skip.INVALID, Skip.UNDECODABLE, DROPPED)),
    ),
)
KV_MISSING = Metric(
    "kv_missing_messages", _C, "messages", "Messages of KV events that never came, by their publishers' numbers."
)
KV_BATCHES = Metric(
    "kv_batches",
    _C,
    "batches",
    "Batches of KV events that reached the join: used, or left out by reason.",
    (("outcome", (ACCEPTED, Skip.DUPLICATE, Skip.LATE)),),
)
KV_EVENTS = Metric(
    "kv_events",
    _C,
    "events",
    "The events in them: understood, or left out by reason.",
    (("outcome", (ACCEPTED, Skip.DUPLICATE, Skip.LATE, Skip.FOREIGN)),),
)
KV_HIT_TOKENS = Metric(
    "kv_prefix_hit_tokens", _C, "tokens", "Prompt tokens found in the cache, subtracted from rebuilt prefills."
)
KV_UNBOUND = Metric("kv_unbound_publishers", _G, "publishers", "Publishers that belong to no known engine.")
SCRAPES = Metric(
    "scrape_pages",
    _C,
    "pages",
    "Questions for servers' pages of counters, and for who they are (discovery), by how they ended.",
    (
        ("of", ("counters", "discovery")),
        (
            "outcome",
            (
                Asked.TAKEN,
                Asked.UNREACHABLE,
                Asked.REFUSED,
                Asked.UNAUTHENTICATED,
                Asked.UNEXPECTED,
                Asked.MISSING_FAMILIES,
                Asked.TOO_LARGE,
                Asked.DROPPED,
            ),
        ),
    ),
)
COMPLETENESS = Metric(
    "telemetry_completeness_ratio",
    _G,
    "",
    "Steps heard of by telemetry / steps counted on the same engine's page, the worst engine; absent without both.",
)
WRITES = Metric(
    "writes",
    _C,
    "writes",
    "Generations made, snapshot files and checkpoints written, or failed.",
    (("of", ("generation", "snapshot", "checkpoint")), ("outcome", ("done", "failed"))),
)
STATE_RESTORED = Metric(
    "state_restored",
    _G,
    "",
    "What this process began with: 1 for one outcome.",
    (("outcome", tuple(Restored)),),
)
STATE_WRITTEN = Metric(
    "state_last_write_timestamp_seconds",
    _G,
    "seconds",
    "When the newest state file was written, be it by an earlier process; 0 = not yet.",
)
LOG_REPLAYED = Metric("log_replayed_spans", _C, "spans", "Spans read again from the log after a restart.")
LOST_AT_START = Metric(
    "restart_lost",
    _G,
    "",
    "What a process before had acknowledged and is lost: spans after the last checkpoint, where it was killed, and"
    " damaged entries of its log.",
    (("of", ("spans", "entries")),),
)
LEARNING_STALLED = Metric(
    "learning_stalled",
    _G,
    "",
    "1 while spans have arrived for ten minutes and no row was learned, by reason.",
    (("reason", tuple(Stall)),),
)
QUARANTINED = Metric("quarantined_configs", _G, "configs", "Configurations put aside now.")
CONFIG_DEGRADED = Metric(
    "config_degraded",
    _G,
    "",
    "1 while the defaults hold, because the configuration given at the start was wrong.",
)
BUILD_INFO = Metric("build_info", _G, "", "The running version; always 1.", (("version", (__version__,)),))

TABLE: tuple[Metric, ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""All of the above, in their order: what is defined is on the page."""

FLEET_SOURCES = Metric(
    "fleet_sources",
    _G,
    "sources",
    "Sources of states at the last pull, by what became of them.",
    (
        (
            "outcome",
            (
                Asked.MERGED,
                Asked.UNREACHABLE,
                Asked.REFUSED,
                Asked.UNAUTHENTICATED,
                Asked.UNEXPECTED,
                Asked.TOO_LARGE,
                Asked.NOTHING_YET,
                Asked.FUTURE,
                Asked.SAME_ENGINE,
            ),
        ),
    ),
)
FLEET_ENGINES = Metric("fleet_engines", _G, "engines", "Engines whose rows are in the coefficients of the last pull.")
FLEET_PULLS = Metric("fleet_pulls", _C, "pulls", "Rounds of asking every source.")
FLEET_PULL_FAILURES = Metric(
    "fleet_pull_failures", _C, "pulls", "Rounds that wrote nothing: too few sources answered, or the disk is full."
)
FLEET_WRITTEN = Metric(
    "fleet_last_write_timestamp_seconds",
    _G,
    "seconds",
    "When a round last ended with files as new as the sources; 0 = not yet.",
)

FLEET_TABLE: tuple[Metric, ...] = (
    FLEET_SOURCES,
    FLEET_ENGINES,
    FLEET_PULLS,
    FLEET_PULL_FAILURES,
    FLEET_WRITTEN,
    BUILD_INFO,
)
"""What `tracefit fleet pull --every` shows instead of the table of the sidecar."""
