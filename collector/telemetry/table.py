"""Our own metrics as one table: what exists, its type, unit, closed label values and meaning.

received = accepted + refused + failed, per transport, for spans, always; what the decoder leaves out afterwards has its
own equation (``decode_*``). Coefficients are not here: they are drawn from the snapshot by the exporter. The live
objects are in collector/telemetry/metrics.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Self

from collector import __version__
from online import RowOutcome, Target

from .reasons import (
    REFUSALS,
    Direction,
    DiscoveryOutcome,
    ForwardOutcome,
    FpmSkip,
    JoinEvent,
    KvSkip,
    Outcome,
    Phase,
    PluginLoss,
    PullOutcome,
    Restored,
    RowDrop,
    ScrapeOutcome,
    SequenceEvent,
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


_TRANSPORTS = tuple(Transport)
_C, _G = Kind.COUNTER, Kind.GAUGE
_BY_TRANSPORT = (("transport", _TRANSPORTS),)
_BY_SKIP = (("reason", tuple(Skip)),)
_BY_KV_SKIP = (("reason", tuple(KvSkip)),)
_BY_MOVE = (("direction", tuple(Direction)), ("phase", tuple(Phase)))

RECEIVED_SPANS = Metric("receiver_received_spans", _C, "spans", "Spans in exports that decoded.", _BY_TRANSPORT)
ACCEPTED_SPANS = Metric("receiver_accepted_spans", _C, "spans", "Spans acknowledged.", _BY_TRANSPORT)
REFUSED_SPANS = Metric(
    "receiver_refused_spans",
    _C,
    "spans",
    "Spans refused, by reason. The sender was told, unless they were passed on.",
    (("transport", _TRANSPORTS), ("reason", REFUSALS)),
)
FAILED_SPANS = Metric("receiver_failed_spans", _C, "spans", "Spans lost to an error of ours.", _BY_TRANSPORT)
REQUESTS = Metric(
    "receiver_requests",
    _C,
    "requests",
    "Export calls, by how they ended.",
    (("transport", _TRANSPORTS), ("outcome", tuple(Outcome))),
)
FORWARDED_EXPORTS = Metric(
    "forward_exports",
    _C,
    "exports",
    "Exports that were to be passed on, by what became of them.",
    (("signal", tuple(Signal)), ("outcome", tuple(ForwardOutcome))),
)
FORWARDED_SPANS = Metric("forward_spans", _C, "spans", "Spans in these exports.", (("outcome", tuple(ForwardOutcome)),))
FORWARD_QUEUE = Metric("forward_queue_bytes", _G, "bytes", "Payload that waits for the backend.")
FORWARD_CAPACITY = Metric("forward_queue_capacity_bytes", _G, "bytes", "Most payload that may wait for the backend.")
QUEUE_BYTES = Metric("queue_size_bytes", _G, "bytes", "Payload waiting for the worker.")
QUEUE_CAPACITY = Metric("queue_capacity_bytes", _G, "bytes", "Most payload that may be in flight.")
IN_FLIGHT_BYTES = Metric("queue_in_flight_bytes", _G, "bytes", "Payload admitted and not yet learned from.")
MEMORY_LIMIT = Metric(
    "memory_limit_bytes", _G, "bytes", "Resident memory from which on exports are refused; 0 = no limit."
)
WORKER_LAG = Metric(
    "worker_lag_seconds",
    _G,
    "seconds",
    "How long the oldest export of the last batch waited, or has waited where there was none to take.",
)
WORKER_FAILED_SPANS = Metric("worker_failed_spans", _C, "spans", "Acknowledged spans lost to an error of the worker.")
DECODED_SPANS = Metric("decode_received_spans", _C, "spans", "Spans the worker looked at.")
DECODED_SPANS_OK = Metric("decode_accepted_spans", _C, "spans", "Spans understood.")
SKIPPED_SPANS = Metric("decode_skipped_spans", _C, "spans", "Spans left out, by reason.", _BY_SKIP)
DECODED_EVENTS = Metric("decode_received_events", _C, "events", "Events the worker looked at.")
DECODED_EVENTS_OK = Metric("decode_accepted_events", _C, "events", "Events understood.")
SKIPPED_EVENTS = Metric("decode_skipped_events", _C, "events", "Events left out, by reason.", _BY_SKIP)
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
IGNORED_ATTRIBUTES = Metric("decode_ignored_attributes", _C, "attributes", "Attributes of no known name.")
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
ENGINES = Metric("join_engines_size", _G, "engines", "Engines and API processes held, the larger number of the two.")
ENGINES_CAPACITY = Metric(
    "join_engines_capacity", _G, "engines", "Most engines, and most API processes, that are held."
)
ENGINES_REFUSED = Metric(
    "join_engines_refused", _G, "engines", "Engines and API processes without a place lately: raise engines_max."
)
WATERMARK_AGE = Metric(
    "join_watermark_age_seconds", _G, "seconds", "How far published rows trail the newest event; the worst engine."
)
FPM_RECEIVED = Metric("fpm_received_records", _C, "records", "Records of forward passes that came.")
FPM_ACCEPTED = Metric("fpm_accepted_records", _C, "records", "Records that were understood.")
FPM_SKIPPED = Metric(
    "fpm_skipped_records", _C, "records", "Records left out, by reason.", (("reason", tuple(FpmSkip)),)
)
FPM_DROPPED = Metric("fpm_dropped_records", _C, "records", "Records pushed out of the full queue, oldest first.")
FPM_QUEUE = Metric("fpm_queue_records", _G, "records", "Records that wait for the worker.")
KV_RECEIVED_MESSAGES = Metric("kv_receiver_received_messages", _C, "messages", "ZMQ messages of KV events.")
KV_RECEIVED_OK = Metric("kv_receiver_accepted_messages", _C, "messages", "ZMQ messages that held a batch.")
KV_RECEIVED_SKIPPED = Metric(
    "kv_receiver_skipped_messages", _C, "messages", "ZMQ messages left out, by reason.", _BY_KV_SKIP
)
KV_DROPPED_MESSAGES = Metric("kv_receiver_dropped_messages", _C, "messages", "Oldest batches dropped by a full queue.")
KV_QUEUE = Metric("kv_receiver_queue_messages", _G, "messages", "Batches of KV events waiting for the worker.")
KV_SEQUENCE = Metric(
    "kv_sequence",
    _C,
    "events",
    "What the publishers' numbers show: gaps, missing and recovered batches, restarts, replays.",
    (("event", tuple(SequenceEvent)),),
)
KV_MESSAGES = Metric("kv_join_received_messages", _C, "messages", "Batches of KV events that reached the join.")
KV_MESSAGES_OK = Metric("kv_join_accepted_messages", _C, "messages", "Batches of KV events used.")
KV_MESSAGES_SKIPPED = Metric(
    "kv_join_skipped_messages", _C, "messages", "Batches of KV events left out, by reason.", _BY_KV_SKIP
)
KV_EVENTS = Metric("kv_join_received_events", _C, "events", "KV events in batches that reached the join.")
KV_EVENTS_OK = Metric("kv_join_accepted_events", _C, "events", "KV events understood.")
KV_EVENTS_SKIPPED = Metric("kv_join_skipped_events", _C, "events", "KV events left out, by reason.", _BY_KV_SKIP)
KV_TRANSFERS = Metric("kv_transfers", _C, "transfers", "Transfers of KV blocks, by direction and phase.", _BY_MOVE)
KV_BLOCKS = Metric(
    "kv_transfer_blocks", _C, "blocks", "KV blocks in those transfers, in blocks of their source.", _BY_MOVE
)
KV_HIT_TOKENS = Metric(
    "kv_prefix_hit_tokens", _C, "tokens", "Prompt tokens found in the cache, subtracted from rebuilt prefills."
)
KV_HELD = Metric("kv_join_held_batches", _G, "batches", "Batches of KV events held by the join.")
KV_MISSING = Metric("kv_join_missing_batches", _G, "batches", "Numbers missing between the batches held.")
KV_UNBOUND = Metric("kv_join_unbound_publishers", _G, "publishers", "Publishers that belong to no known engine.")
DISCOVERY = Metric(
    "discovery_questions",
    _C,
    "questions",
    "Questions to vLLM's own endpoints, by how they ended.",
    (("outcome", tuple(DiscoveryOutcome)),),
)
SCRAPES = Metric(
    "scrape_pages",
    _C,
    "pages",
    "Questions for servers' pages of counters, by how they ended.",
    (("outcome", tuple(ScrapeOutcome)),),
)
SCRAPED_SERVERS = Metric("scrape_servers", _G, "servers", "Servers whose pages are asked for.")
SCRAPED_SERVERS_CAPACITY = Metric("scrape_servers_capacity", _G, "servers", "Most servers that are asked.")
COMPLETENESS = Metric(
    "telemetry_completeness_ratio",
    _G,
    "",
    "Steps heard of by telemetry / steps counted on the same engine's page, the worst engine; absent without both.",
)
SNAPSHOT_WRITES = Metric("snapshot_writes", _C, "writes", "Snapshot files written.")
SNAPSHOT_WRITE_ERRORS = Metric("snapshot_write_errors", _C, "writes", "Snapshot files that could not be written.")
PUBLISH_ERRORS = Metric("snapshot_publish_errors", _C, "snapshots", "Snapshots that could not be made.")
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
STATE_WRITE_ERRORS = Metric("state_write_errors", _C, "writes", "State files that could not be made or written.")
LOG_BYTES = Metric("log_size_bytes", _G, "bytes", "Acknowledged exports on disk; 0 without a log.")
LOG_CAPACITY = Metric("log_capacity_bytes", _G, "bytes", "Most that the log may hold; 0 without one.")
LOG_REPLAYED = Metric("log_replayed_spans", _C, "spans", "Spans read again from the log after a restart.")
LOG_LOST = Metric("log_lost_entries", _G, "exports", "Entries of an earlier process's log that were lost to damage.")
LOST_SPANS = Metric(
    "restart_lost_spans", _G, "spans", "Spans that a killed process had acknowledged after its last checkpoint."
)
LEARNING_STALLED = Metric(
    "learning_stalled",
    _G,
    "",
    "1 while spans have arrived for ten minutes and no row was learned, by reason.",
    (("reason", tuple(Stall)),),
)
QUARANTINED = Metric("quarantined_configs", _G, "configs", "Configurations put aside now.")
EVICTIONS = Metric(
    "configs_evicted", _C, "configs", "Configurations silent for an hour that made room for others (engines_max)."
)
CONFIGS_REFUSED = Metric(
    "configs_refused", _G, "configs", "Configurations not learned, because engines_max others are alive."
)
CONFIGS_CAPACITY = Metric("configs_capacity", _G, "configs", "Most configurations that are learned at a time.")
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
    (("outcome", tuple(PullOutcome)),),
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
