"""Our own metrics as one table: what exists, its type, closed label values and meaning.

What becomes of a thing is one counter with a label, so that what came is the sum over it: spans and calls per
transport, spans and events of the decoder, messages, batches and events of the KV cache, rows. Coefficients are not
here: they are drawn from the snapshot by the exporter. The live objects are in collector/telemetry/metrics.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from collector import __version__
from online import RowOutcome, Target

from .reasons import (
    REFUSALS,
    ForwardOutcome,
    JoinEvent,
    Outcome,
    PullOutcome,
    Restored,
    RowDrop,
    Signal,
    Skip,
    Transport,
)

PREFIX = "tracefit_"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One line of the table; ``name`` is without the prefix, a counter's without ``_total``.

    A line is itself, like a member of an enum: counts are kept by it.
    """

    name: str
    is_counter: bool
    help: str
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def exposed_name(self) -> str:
        """The name on the page."""
        return f"{PREFIX}{self.name}{'_total' if self.is_counter else ''}"


def _metric(name: str, text: str, /, *, is_counter: bool, **labels: Iterable[str]) -> Metric:
    return Metric(name, is_counter, text, tuple((label, tuple(values)) for label, values in labels.items()))


_counter, _gauge = partial(_metric, is_counter=True), partial(_metric, is_counter=False)
ACCEPTED = Outcome.ACCEPTED
DROPPED = "dropped"

SPANS = _counter(
    "receiver_spans",
    "Spans in exports that decoded, by what became of them; of what was refused the sender was told, unless it was"
    " passed on.",
    transport=Transport,
    outcome=(ACCEPTED, *REFUSALS, Outcome.FAILED),
)
REQUESTS = _counter("receiver_requests", "Export calls, by how they ended.", transport=Transport, outcome=Outcome)
FORWARDED = _counter(
    "forward_exports",
    "Exports that were to be passed on, by what became of them.",
    signal=Signal,
    outcome=ForwardOutcome,
)
FORWARDED_SPANS = _counter("forward_spans", "Spans in these exports.", outcome=ForwardOutcome)
SIZE_BYTES = _gauge(
    "size_bytes",
    "Exports that are not learned from (queue), wait for the backend (forward), or are on disk (log).",
    of=("queue", "forward", "log"),
)
CAPACITY_BYTES = _gauge(
    "capacity_bytes",
    "Most bytes of each, and of resident memory (memory) before exports are refused; 0 = no log, no limit.",
    of=("queue", "forward", "log", "memory"),
)
SIZE = _gauge(
    "size",
    "Engines or API processes, whichever are more; servers that are scraped; messages that wait for the worker; moves"
    " of KV blocks in the join.",
    of=("engines", "servers", "kv", "fpm", "kv_moves"),
)
CAPACITY = _gauge(
    "capacity",
    "Most engines, configurations, servers, and messages that may wait.",
    of=("engines", "configs", "servers", "kv", "fpm"),
)
LIMIT_EXCEEDED = _gauge(
    "limit_exceeded", "Engines and configurations without a place lately: raise engines_max.", of=("engines", "configs")
)
WORKER_LAG = _gauge(
    "worker_lag_seconds",
    "How long the oldest export of the last batch waited, or has waited where there was none to take.",
)
WORKER_FAILED_SPANS = _counter("worker_failed_spans", "Acknowledged spans lost to an error of the worker.")
DECODED_SPANS = _counter(
    "decode_spans", "Spans the worker looked at: understood, or left out by reason.", outcome=(ACCEPTED, *Skip)
)
DECODED_EVENTS = _counter(
    "decode_events", "Their events: understood, or left out by reason.", outcome=(ACCEPTED, *Skip)
)
SDK_DROPPED_EVENTS = _counter(
    "decode_sdk_dropped_events", "Events the sender's SDK dropped (raise OTEL_SPAN_EVENT_COUNT_LIMIT there)."
)
ROWS = _counter(
    "rows",
    "Interval equations offered to the learners, by target and what became of them.",
    target=Target,
    outcome=RowOutcome,
)
DROPPED_ROWS = _counter("join_dropped_rows", "Intervals that gave no equation, by reason.", reason=RowDrop)
JOIN_EVENTS = _counter("join_events", "What the join met besides rows, by kind.", event=JoinEvent)
PENDING = _gauge(
    "join_pending",
    "Steps, requests and rows that are not learned yet.",
    what=("steps", "requests", "rows"),
)
WATERMARK_AGE = _gauge("join_watermark_age_seconds", "How far published rows trail the newest event; the worst engine.")
MESSAGES = _counter(
    "messages",
    "ZMQ messages of KV events and ForwardPassMetrics: accepted, or left out by reason; dropped: accepted, and"
    " pushed out of the full queue.",
    feed=("kv", "fpm"),
    outcome=(ACCEPTED, Skip.UNKNOWN_SCOPE, Skip.INVALID, Skip.UNDECODABLE, Outcome.TOO_LARGE, DROPPED),
)
KV_MISSING = _counter("kv_missing_messages", "Messages of KV events that never came, by their publishers' numbers.")
KV_BATCHES = _counter(
    "kv_batches",
    "Batches of KV events that reached the join: used, or left out by reason.",
    outcome=(ACCEPTED, Skip.DUPLICATE, Skip.LATE),
)
KV_EVENTS = _counter(
    "kv_events",
    "The events in them: understood, or left out by reason.",
    outcome=(ACCEPTED, Skip.DUPLICATE, Skip.LATE, Skip.UNKNOWN_SCOPE),
)
KV_UNBOUND = _gauge("kv_unbound_publishers", "Publishers that belong to no known engine.")
SCRAPES = _counter(
    "scrape_pages",
    "Questions for servers' pages of counters, and for who they are (discovery), by how they ended.",
    of=("counters", "discovery"),
    outcome=(
        PullOutcome.READ,
        PullOutcome.UNREACHABLE,
        PullOutcome.REFUSED,
        PullOutcome.UNAUTHENTICATED,
        PullOutcome.UNEXPECTED,
        PullOutcome.MISSING_FAMILIES,
        PullOutcome.TOO_LARGE,
        PullOutcome.DROPPED,
    ),
)
COMPLETENESS = _gauge(
    "telemetry_completeness_ratio",
    "Steps heard of by telemetry / steps counted on the same engine's page, the worst engine; absent without both.",
)
WRITES = _counter(
    "writes",
    "Generations made, snapshot files and checkpoints written, or failed.",
    of=("generation", "snapshot", "checkpoint"),
    outcome=("done", "failed"),
)
STATE_RESTORED = _gauge("state_restored", "What this process began with: 1 for one outcome.", outcome=Restored)
STATE_WRITTEN = _gauge(
    "state_last_write_timestamp_seconds",
    "When the checkpoint was written, be it by an earlier process; 0 = not yet.",
)
LOG_REPLAYED = _counter("log_replayed_spans", "Spans read again from the log after a restart.")
LOST_AT_START = _gauge("restart_lost_entries", "Damaged entries of the log that this process found at its start.")
QUARANTINED = _gauge("quarantined_configs", "Configurations quarantined now.")
CONFIG_DEGRADED = _gauge(
    "config_degraded", "1 while the defaults hold, because the configuration given at the start was wrong."
)
BUILD_INFO = _gauge("build_info", "The running version; always 1.", version=(__version__,))

TABLE: tuple[Metric, ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""All of the above, in their order: what is defined is on the page."""

FLEET_SOURCES = _gauge(
    "fleet_sources",
    "Sources of states at the last pull, by what became of them.",
    outcome=(
        PullOutcome.MERGED,
        PullOutcome.UNREACHABLE,
        PullOutcome.REFUSED,
        PullOutcome.UNAUTHENTICATED,
        PullOutcome.UNEXPECTED,
        PullOutcome.TOO_LARGE,
        PullOutcome.NOTHING_YET,
        PullOutcome.SAME_ENGINE,
    ),
)
FLEET_PULL_FAILURES = _counter(
    "fleet_pull_failures", "Rounds that wrote nothing: too few sources answered, or the disk is full."
)
FLEET_WRITTEN = _gauge(
    "fleet_last_write_timestamp_seconds", "When a round last ended with files as new as the sources; 0 = not yet."
)

FLEET_TABLE = (FLEET_SOURCES, FLEET_PULL_FAILURES, FLEET_WRITTEN, BUILD_INFO)
"""What `tracefit fleet pull --every` shows instead of the table of the sidecar."""
