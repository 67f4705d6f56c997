"""The composition root: builds the sidecar, starts it, stops it in order. The only module that knows everybody.

Stop, within ``shutdown.grace_s + shutdown.drain_s`` and a second or two: readiness flips, calls in flight finish, the
queue drains, the last generation is published and written, the pages close last so that a scrape still sees it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry

from collector import __version__
from collector.config import Config, ConfigError, ConfigWatch, parse_endpoint
from collector.durable import Durability
from collector.identity import Discovery, Knowledge
from collector.receive import AdmissionQueue, Export, Intake, TokenFile
from collector.receive.kv import KvIntake
from collector.receive.otlp import Reception
from collector.runtime import (
    Clock,
    Files,
    Health,
    MemoryGuard,
    StartError,
    Stop,
    cgroup_limit_bytes,
    limit_bytes,
    logs,
    resident_bytes,
    tune_malloc,
)
from collector.telemetry import Metrics, Outcome, table
from collector.worker import Pipeline, Publisher, SnapshotWriter, StallWatch, Worker, make_pipeline
from exporters.pages import HttpServer, SnapshotDocuments, protect
from exporters.prometheus import MetricsPage
from exporters.routes import make_routes
from exporters.status_page import StatusPage
from online import Snapshot

HANDLERS_FREE = 2
"""Of the receiver's threads, how many never wait for room: health checks and exports that fit get through."""

SWITCH_INTERVAL_S = 0.001

LAST_BATCH_S = 2.0
"""For the batch under way and the last generation, when the drain budget is used up."""

WRITER_NAME = "snapshot-writer"
WRITER_TIMEOUT_S = 120.0
"""A write that takes longer hangs in the kernel."""

_log = logging.getLogger(__name__)


class ConfigSource(NamedTuple):
    """Where the configuration came from, to look again."""

    path: Path
    read: Callable[[], Config]


class Sidecar:
    """One running instance; ``start`` once, ``stop`` once. Ports are known after ``start``."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        on_death: Callable[[], None] = lambda: None,
        files: Files | None = None,
        source: ConfigSource | None = None,
    ) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the counter series
        self.config = config
        self.http_port = 0
        self.metrics = Metrics(CollectorRegistry())
        self.health = Health(clock)
        self.queue = AdmissionQueue[Export](
            clock,
            capacity_bytes=config.queue.capacity_bytes,
            wait_s=config.queue.wait_s,
            waiters_max=config.receivers.grpc.threads - HANDLERS_FREE,
            record=self._record,
        )
        self.metrics.set(table.QUEUE_CAPACITY, config.queue.capacity_bytes)
        self.metrics.set(table.CONFIGS_CAPACITY, config.bank.configs_max)
        self.metrics.follow(table.QUEUE_BYTES, lambda: self.queue.queued_bytes)
        self.metrics.follow(table.IN_FLIGHT_BYTES, lambda: self.queue.in_flight_bytes)
        knowledge = Knowledge(config.configurations)
        self.pipeline: Pipeline = make_pipeline(config, knowledge)
        self.discovery = Discovery(
            config.configurations.discovery,
            knowledge,
            clock,
            lambda outcome: self.metrics.add(table.DISCOVERY, 1, outcome),
        )
        self.metrics.follow(table.OPEN_REQUESTS, lambda: self.pipeline.joiner.open_requests)
        self.metrics.follow(table.WATERMARK_AGE, lambda: self.pipeline.joiner.watermark_age_s)
        self._status = StatusPage(
            self.snapshot,
            self.metrics.registry,
            ready=self._probe_ready,
            unix_nano=clock.unix_nano,
            version=__version__,
        )
        self._publisher = Publisher(
            self.pipeline, self.metrics, clock, config.snapshot.publish_interval_s, self._status.record
        )
        self._keep = Durability(
            config, self.pipeline, self._publisher, metrics=self.metrics, health=self.health, clock=clock, files=files
        )
        self._kv = KvIntake(config.receivers.kv, self.metrics, clock, self.health)
        self._worker = Worker(
            self.queue,
            self.pipeline,
            self._publisher,
            health=self.health,
            metrics=self.metrics,
            clock=clock,
            batch_bytes=config.queue.batch_bytes,
            on_death=on_death,
            take_kv=self._kv.take,
            keep=self._keep,
            watch=StallWatch(clock, config.state.stalled_after_s),
        )
        self._writer = SnapshotWriter(
            Path(config.snapshot.directory),
            self._publisher,
            self.metrics,
            clock,
            config.snapshot.interval_s,
            check_in=lambda: self.health.check_in(WRITER_NAME),
        )
        self._reception = self._make_reception(clock)
        pages = config.exporters.http
        self._read_tokens = (
            TokenFile(pages.token_file, "exporters.http.token_file", clock) if pages.token_file else None
        )
        self._pages: HttpServer | None = None
        self._knowledge = knowledge
        self.watch = self._make_watch(source) if source is not None and config.reload_interval_s else None

    @property
    def grpc_port(self) -> int:
        """Of OTLP/gRPC."""
        return self._reception.grpc_port

    @property
    def otlp_http_port(self) -> int:
        """Of OTLP/HTTP, 0 if that is off."""
        return self._reception.http_port

    @property
    def snapshot_path(self) -> Path:
        """Where the coefficients are written."""
        return self._writer.path

    def snapshot(self) -> Snapshot | None:
        """The newest generation."""
        return self._publisher.current()

    def start(self) -> None:
        """Take the ports and the directory, or raise StartError; then serve."""
        try:
            self._pages = self._make_pages()
            self.http_port = self._pages.port
            self._writer.start()
            self.health.register(WRITER_NAME, self.config.snapshot.interval_s + WRITER_TIMEOUT_S)
            self._keep.start()
            self.discovery.start()
            if self.watch is not None:
                self.watch.start()
            self._worker.start()
            self._pages.start()
            self._kv.start()
            self._reception.start()
        except (StartError, ConfigError):
            self.stop()
            raise
        self.health.set_serving(True)
        _log.info("receiving OTLP/gRPC on port %d, pages on port %d", self.grpc_port, self.http_port)
        if self.otlp_http_port:
            _log.info("receiving OTLP/HTTP on port %d", self.otlp_http_port)

    def stop(self) -> bool:
        """Drain and end; False if acknowledged telemetry or the last snapshot was lost."""
        shutdown = self.config.shutdown
        self.health.set_serving(False)
        self.discovery.stop()
        if self.watch is not None:
            self.watch.stop()
        self._reception.stop(shutdown.grace_s)
        self._kv.stop()
        self.queue.close()
        drained = self._worker.finish(shutdown.drain_s, LAST_BATCH_S)
        written = self._keep.stop()
        written = self._writer.stop() and written
        self.health.unregister(WRITER_NAME)
        if self._pages is not None:
            self._pages.stop()
        if not drained and self.config.durability == "journal" and not self._worker.died:
            _log.warning("stopped before the queue was drained: the rest is in the journal")
            drained = True
        if not drained:
            _log.error("stopped before the queue was drained: %d bytes not learned from", self.queue.in_flight_bytes)
        return drained and written

    def _record(self, export: Export) -> Export | Outcome:
        return self._keep.record(export)

    def _make_watch(self, source: ConfigSource) -> ConfigWatch:
        return ConfigWatch(
            source.path,
            source.read,
            self.config,
            apply=self._reconfigure,
            count=lambda outcome: self.metrics.add(table.CONFIG_RELOADS, 1, outcome),
            interval_s=self.config.reload_interval_s,
        )

    def _reconfigure(self, config: Config) -> None:
        self._knowledge.replace_rules(config.configurations)
        self._publisher.set_interval(config.snapshot.publish_interval_s)
        self._writer.set_interval(config.snapshot.interval_s)
        self.health.register(WRITER_NAME, config.snapshot.interval_s + WRITER_TIMEOUT_S)
        logs.set_level(config.log_level)

    def _make_reception(self, clock: Clock) -> Reception:
        limit = limit_bytes(self.config.memory.limit_mib, cgroup_limit_bytes())
        self.metrics.set(table.MEMORY_LIMIT, limit or 0)
        intake = Intake(self.queue, self.metrics, MemoryGuard(limit, resident_bytes, clock), self._keep.sync)
        return Reception(self.config.receivers, intake, health=self.health, clock=clock)

    def _make_pages(self) -> HttpServer:
        address, port = parse_endpoint(self.config.exporters.http.endpoint)
        routes = make_routes(
            MetricsPage(
                self.metrics.registry,
                self.snapshot,
                exemplar_of=lambda config_id, target: self.pipeline.exemplars.get((config_id, target)),
            ),
            SnapshotDocuments(self._publisher.current),
            alive=self._probe_alive,
            ready=self._probe_ready,
            status_page=self._status,
        )
        if self._read_tokens is not None:
            routes = protect(routes, self._read_tokens.accepts)
        try:
            return HttpServer(address, port, routes)
        except OSError as error:
            endpoint = self.config.exporters.http.endpoint
            raise StartError(f"cannot listen on {endpoint} for the pages: {error.strerror}") from None

    def _probe_alive(self) -> tuple[bool, Mapping[str, object]]:
        late = self.health.late()
        return not late, {"late": list(late)}

    def _probe_ready(self) -> tuple[bool, Mapping[str, object]]:
        problem = self.watch.problem if self.watch is not None else ""
        told = {"config_problem": problem} if problem else {}
        return self.health.ready(), {"late": list(self.health.late()), **self._keep.told(), **told}


def run(config: Config, clock: Clock, stop: Stop, source: ConfigSource | None = None) -> bool:
    """Serve until asked to stop, or until the worker dies; True if nothing was lost."""
    # A handler that has its answer ready waits this long for the interpreter while the worker computes; the default of
    # 5 ms, paid several times in a call, is most of what an exporter would notice.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tune_malloc()
    logs.set_level(config.log_level)
    sidecar = Sidecar(config, clock, on_death=stop.ask, source=source)
    sidecar.start()
    stop.wait()
    return sidecar.stop()
