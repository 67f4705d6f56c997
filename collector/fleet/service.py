"""``tracefit fleet pull --every``: rounds on a timer, with metrics, a status page with the fleet view, and health.

    pages ─ puller

A round that writes nothing leaves the files, the pages and the coefficients of the last good one, and readiness says
why. Alive means that rounds end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from collector import __version__
from collector.config import Config, parse_endpoint
from collector.ingest import TokenFile
from collector.runtime import Clock, Health, StartError, Task, serve
from collector.runtime.http import make_page_server
from collector.telemetry import Metrics, table
from exporters.pages import dispatch, protect
from exporters.status_page import StatusPage
from online import Snapshot

from .pull import Pulled, Puller, complaints, report

ROUND_TIMEOUT_S = 900.0
"""A round that takes longer hangs."""

_log = logging.getLogger(__name__)


class FleetService:
    """``start`` once, ``stop`` once."""

    def __init__(self, puller: Puller, config: Config, clock: Clock, *, interval_s: float) -> None:
        self.metrics = Metrics(table.FLEET_TABLE)
        self.health = Health(clock)
        self._clock = clock
        self._interval_s = interval_s
        self._puller = puller
        self._pulled = Pulled([], problem="the first pull is under way")
        self._said: list[str] = []
        page = StatusPage(
            self.snapshot,
            self.metrics.registry,
            ready=self._probe_ready,
            unix_nano=clock.unix_nano,
            version=__version__,
            fleet=lambda: self._pulled.sources,
        )
        routes = page.routes(self.health.probe_alive)
        if config.pages_token_file:
            routes = protect(routes, TokenFile(config.pages_token_file, "pages_token_file", clock).accepts)
        self._pages = make_page_server(parse_endpoint(config.pages), partial(dispatch, routes))
        self._task = Task("fleet-pull", self.pull_round, health=self.health, timeout_s=ROUND_TIMEOUT_S)

    @property
    def http_port(self) -> int:
        """The port of the pages, which a configured 0 leaves open."""
        return self._pages.port

    def snapshot(self) -> Snapshot | None:
        """What was written last."""
        return self._pulled.snapshot

    async def start(self) -> None:
        """Take the directory and the port, or raise StartError; then pull."""
        self._puller.start()
        try:
            await self._pages.start()
        except StartError:
            self._puller.stop()
            raise
        self._task.start()
        self.health.set_serving(True)
        _log.info("pulling every %g s, pages on port %d", self._interval_s, self.http_port)

    async def stop(self) -> bool:
        """End after the round under way."""
        self.health.set_serving(False)
        ended = await asyncio.to_thread(self._task.stop, ROUND_TIMEOUT_S)
        await self._pages.stop()
        self._puller.stop()
        return ended

    def pull_round(self) -> float:
        """One round; the pause before the next."""
        start_ns = self._clock.monotonic_ns()
        self._pulled = pulled = self._puller.pull()
        took_s = (self._clock.monotonic_ns() - start_ns) / 1e9
        metrics = self.metrics
        ((_, outcomes),) = table.FLEET_SOURCES.labels
        for outcome in outcomes:
            number = sum(source.outcome == outcome for source in pulled.sources)
            metrics.set(table.FLEET_SOURCES, number, outcome)
        if pulled.problem:
            metrics.add(table.FLEET_PULL_FAILURES)
        else:
            metrics.set(table.FLEET_WRITTEN, self._clock.unix_nano() / 1e9)
        self._tell(pulled)
        return max(self._interval_s - took_s, 0.0)

    def _tell(self, pulled: Pulled) -> None:
        """Log the result of a round in one line, if it differs from that of the last round."""
        lines = [*complaints(pulled), pulled.problem]
        if lines != self._said:
            level = logging.WARNING if any(lines) else logging.INFO
            _log.log(level, "%s", "; ".join(filter(None, [*report(pulled), *lines])))
        self._said = lines

    def _probe_ready(self) -> tuple[bool, Mapping[str, object]]:
        problem = self._pulled.problem
        detail = {"late": list(self.health.late()), **({"pull_problem": problem} if problem else {})}
        return self.health.ready() and not problem, detail


def serve_fleet(service: FleetService) -> bool:
    """Pull until asked to stop."""
    return asyncio.run(serve(lambda *_: service))
