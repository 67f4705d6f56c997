"""The composition root: builds the sidecar, starts its parts in order, stops them in reverse. It alone knows everybody.

    pages ─ durability ─ snapshot writer ─ worker ─ KV events ─ scraper ─ gRPC ─ HTTP

The I/O of all parts happens in one asyncio loop, in which they start and stop. The worker learns in a thread, and in
theirs durability and the snapshot writer wait for the disk.

Stop takes at most ``STOP_TIMEOUT_S`` + ``FLUSH_S`` + ``drain_s`` + ``LAST_BATCH_S``. Readiness flips, no export enters
any more, and who waits for room is told so. What waits for the backend is sent. The queue drains, and the last state
and generation are written. The pages close last, so that a scrape still sees the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from collector import __version__
from collector.config import Config, ConfigError, Loaded, parse_endpoint
from collector.decode import Export
from collector.identity import ConfigResolver
from collector.ingest import (
    BATCH_S,
    ExportConsumer,
    ExportQueue,
    Forwarder,
    TokenFile,
    read_credentials,
)
from collector.ingest.otlp_grpc import OtlpGrpcReceiver
from collector.ingest.otlp_http import make_http_receiver
from collector.ingest.scrape import SERVERS_MAX, Scraper
from collector.ingest.zmq import FPM_FEED, KV_FEED, Subscriber
from collector.runtime import (
    Clock,
    Health,
    MemoryGuard,
    Part,
    StartError,
    SteadyClock,
    SystemFiles,
    limit_bytes,
    resident_bytes,
    serve,
    set_log_level,
)
from collector.runtime.http import HttpServer, make_page_server
from collector.service import (
    Durability,
    EventTime,
    MemoryLimiter,
    Pipeline,
    Publisher,
    SnapshotWriter,
    Worker,
    make_pipeline,
)
from collector.telemetry import Metrics, Outcome, Signal, table
from exporters.pages import dispatch, protect
from exporters.status_page import StatusPage
from exporters.what_if import Advisory
from exporters.wording import name_of, pending_sentence
from online import Snapshot

GENERATIONS_PER_FILE = 2
"""``snapshot.json`` is written at every second pause between generations: a slow disk is spared, and readers poll."""
STOP_TIMEOUT_S = 3.0
"""How long calls that run may still end after SIGTERM; with the rest of a stop it fits a pod's 30 s."""

_log = logging.getLogger(__name__)


class OffLoop(NamedTuple):
    """Wraps a part whose start and stop wait for the disk or a thread, so that the loop goes on meanwhile."""

    part: Durability | SnapshotWriter | Worker

    async def start(self) -> None:
        """Start it in a thread."""
        await asyncio.to_thread(self.part.start)

    async def stop(self) -> bool:
        """Stop it in a thread."""
        return await asyncio.to_thread(self.part.stop)


class Sidecar:
    """One running instance; ``start`` once, ``stop`` once. Ports are known after ``start``.

    To make one checks its configuration: a ConfigError says what would keep it from running.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_death: Callable[[], None] = lambda: None,
        files: SystemFiles | None = None,
        problem: str = "",
    ) -> None:
        """``problem`` of the configuration given keeps the pages closed."""
        self.config, self._clock, self._problem = config, clock, problem
        self.metrics = metrics = Metrics()
        self.health = health = Health(clock)
        self._knowledge = ConfigResolver(config)
        self.pipeline: Pipeline = make_pipeline(config, self._knowledge)
        self._advisory = Advisory(self.pipeline.workload_of, config.itl_ms)
        self._publisher = Publisher(self.pipeline, metrics, clock, config.publish_interval_s, self._advisory.verdict)
        every_s = GENERATIONS_PER_FILE * config.publish_interval_s
        self._writer = SnapshotWriter(Path(config.directory), self._publisher, every_s, metrics=metrics, health=health)
        self.queue = ExportQueue(
            clock,
            capacity_bytes=int(config.queue_mib * 2**20),
            record=self._record,
            batch_s=min(BATCH_S, config.publish_interval_s, config.idle_timeout_s / 4),
        )
        self._keeper = Durability(
            config,
            self.pipeline,
            metrics=metrics,
            health=health,
            clock=clock,
            files=files or SystemFiles(),
            on_freed=self.queue.retry,
        )
        log = self._keeper.log
        self._forward = Forwarder(config, clock, metrics, log, health) if config.forward else None
        memory = MemoryGuard(limit_bytes(config.memory_limit_mib), resident_bytes)
        self._memory = self._make_memory_relief(memory.limit_bytes, clock)
        told = metrics, clock, health, memory.is_short
        self._kv = Subscriber(KV_FEED, config, *told)
        self._fpm = Subscriber(FPM_FEED, config, *told)
        count = partial(metrics.add, table.SCRAPES, 1)
        self._scraper = Scraper(config, clock, count, self._knowledge.discovered, health)
        self._grpc, self._http = self._make_receivers(clock)
        self._pages = self._make_pages(clock)
        self._event_time = EventTime(self.pipeline, metrics, clock, self.queue.queue_age_ns)
        self._parts: tuple[Part, ...] = (
            self._pages,
            OffLoop(self._keeper),
            OffLoop(self._writer),
            OffLoop(self._make_worker(on_death)),
            self._kv,
            self._fpm,
            self._scraper,
            *((self._forward,) if self._forward is not None else ()),
            self._grpc,
            *((self._http,) if self._http is not None else ()),
        )
        self._follow_gauges()

    @property
    def http_port(self) -> int:
        """The port the pages are served on, which a configured 0 leaves open."""
        return self._pages.port

    @property
    def grpc_port(self) -> int:
        """The port of OTLP/gRPC, which a configured 0 leaves open."""
        return self._grpc.port

    @property
    def otlp_http_port(self) -> int:
        """Of OTLP/HTTP, 0 if that is off."""
        return self._http.port if self._http is not None else 0

    def snapshot(self) -> Snapshot | None:
        """The newest generation that was published."""
        return self._publisher.current()

    async def start(self) -> None:
        """Take the ports and the directory, or raise StartError; then serve."""
        try:
            for part in self._parts:
                await part.start()
        except (StartError, ConfigError):
            await self.stop()
            raise
        self.health.set_serving(True)
        _log.info("receiving OTLP/gRPC on port %d, pages on port %d", self.grpc_port, self.http_port)
        if self.otlp_http_port:
            _log.info("receiving OTLP/HTTP on port %d", self.otlp_http_port)

    async def stop(self) -> bool:
        """Drain and end; False if acknowledged telemetry or the last snapshot was lost."""
        self.health.set_serving(False)
        self.queue.close()
        return all([await part.stop() for part in reversed(self._parts)])

    def _record(self, export: Export) -> Export | Outcome:
        """Write down what enters the queue, and put it into the queue of the backend."""
        recorded = self._keeper.record(export)
        if self._forward is not None and isinstance(recorded, Export):
            self._forward.enqueue(Signal.TRACES, recorded.payload, recorded.spans, recorded.seq)
        return recorded

    # --- making the parts -------------------------------------------------------------------------------------------

    def _make_worker(self, on_death: Callable[[], None]) -> Worker:
        return Worker(
            self.queue,
            self.pipeline,
            self._publisher,
            self._keeper,
            take_others={"kv": self._kv.take, "pages": self._scraper.take, "passes": self._fpm.take},
            watches=(self._event_time.tick, self._memory.tick),
            drain_s=self.config.drain_s,
            health=self.health,
            metrics=self.metrics,
            on_death=on_death,
        )

    def _make_memory_relief(self, limit: int | None, clock: Clock) -> MemoryLimiter:
        self.metrics.set(table.CAPACITY_BYTES, limit or 0, "memory")
        # gRPC holds a message twice for a moment, and what is on its way comes on top of what is in use
        room = 2 * (self.config.message_max_mib << 20)
        guard = MemoryGuard(limit and max(limit - room, limit // 2), resident_bytes)
        return MemoryLimiter(guard, self.pipeline.shed_memory, clock)

    def _make_receivers(self, clock: Clock) -> tuple[OtlpGrpcReceiver, HttpServer | None]:
        config = self.config
        tls, tokens = read_credentials(config, clock)
        consumer = ExportConsumer(
            self.queue,
            self.metrics,
            self._memory.guard,
            SteadyClock(clock).unix_nano,
            tokens,
            self._forward,
            config.message_max_mib << 20,
        )
        stop_timeout_s = STOP_TIMEOUT_S / 2 if config.listen_http else STOP_TIMEOUT_S
        grpc = OtlpGrpcReceiver(config, consumer, stop_timeout_s=stop_timeout_s, tls=tls)
        if not config.listen_http:
            return grpc, None
        return grpc, make_http_receiver(config, consumer, stop_timeout_s=stop_timeout_s, tls=tls)

    def _make_pages(self, clock: Clock) -> HttpServer:
        config = self.config
        page = StatusPage(
            self.snapshot,
            self.metrics.registry,
            ready=self._probe_ready,
            unix_nano=clock.unix_nano,
            advisory=self._advisory,
            pending=self._pending,
            history_of=self.pipeline.history_of,
            version=__version__,
            otlp_port=self._otlp_port,
        )
        routes = page.routes(self.health.probe_alive, self._keeper.checkpoint.read if config.pages_state else None)
        if config.pages_token_file:
            routes = protect(routes, TokenFile(config.pages_token_file, "pages_token_file", clock).accepts)
        elif self._problem:
            routes = protect(routes, lambda _: False, "closed while the configuration is wrong: see /readyz")
        return make_page_server(parse_endpoint(config.pages), partial(dispatch, routes))

    def _follow_gauges(self) -> None:
        config, queue = self.config, self.queue
        metrics = self.metrics
        metrics.set(table.CONFIG_DEGRADED, bool(self._problem))
        metrics.set(table.CAPACITY_BYTES, queue.capacity_bytes, "queue")
        for of, most in (("engines", config.engines_max), ("configs", config.configs_max), ("servers", SERVERS_MAX)):
            metrics.set(table.CAPACITY, most, of)
        metrics.follow(table.SIZE, lambda: self._scraper.servers, "servers")
        metrics.follow(table.COMPLETENESS, lambda: self.pipeline.joiner.pages.completeness)
        metrics.follow(table.SIZE_BYTES, lambda: queue.in_flight_bytes, "queue")

    def _otlp_port(self) -> int:
        """Port to which vLLM should send, known even before the sidecar serves it."""
        return self.grpc_port or parse_endpoint(self.config.listen).port

    def _pending(self) -> str:
        """What is held but not learned yet, in a sentence; empty while nothing is."""
        held = self._event_time.pending
        return pending_sentence(*held) if held is not None else ""

    # --- what the probes are told -----------------------------------------------------------------------------------

    def _probe_ready(self) -> tuple[bool, Mapping[str, object]]:
        ready, late = self.health.ready(), list(self.health.late())
        said: dict[str, object] = {
            **self._keeper.readiness_detail(),
            "receiver_problem": "" if ready or late else "the receivers are closed, since the process starts or stops",
            "config_problem": self._problem,
            "memory_problem": self._memory.problem,
            "snapshot_problem": self._writer.problem,
            "news": self._news(),
            "scrape": list(self.config.scrape),
            "pending": self._pending(),
        }
        always = {"late": late, "otlp_grpc_port": self._otlp_port()}
        return ready, always | {name: text for name, text in said.items() if text}

    def _news(self) -> list[str]:
        """Problems in the verdicts on the newest snapshot, for readiness."""
        snapshot, now_unix_nano = self.snapshot(), self._clock.unix_nano()
        if snapshot is None:
            return []
        return [
            f"{name_of(config)}: {problem.text}"
            for config in snapshot.configs
            for problem in self._advisory.verdict(snapshot, config).problems(now_unix_nano)
        ]


def run(loaded: Loaded, clock: Clock) -> bool:
    """Serve until asked to stop, or until the worker dies; True if nothing was lost."""
    config, problem = loaded
    set_log_level(config.log_level)
    if problem:
        _log.error("%s", problem)

    return asyncio.run(serve(lambda ask_stop: Sidecar(config, clock, ask_stop, problem=problem)))
