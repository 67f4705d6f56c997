"""The OTLP receivers together: made from the configuration, started, stopped, and watched while they run.

Each is part of health under its own name from its start to its stop (collector/receive/otlp/watch.py says by what).
"""

from __future__ import annotations

from collector.config import ReceiversConfig
from collector.receive.auth import TokenFile
from collector.receive.intake import Intake
from collector.receive.tls import TlsFiles
from collector.runtime import Clock, Health

from .otlp_grpc import OtlpGrpcReceiver
from .otlp_http import OtlpHttpReceiver
from .watch import CHECK_IN_TIMEOUT_S, WatchedOffer

GRPC_NAME = "grpc-receiver"
HTTP_NAME = "http-receiver"


class Reception:
    """``start`` once, ``stop`` once; ports are known after ``start``, 0 before and where nothing listens."""

    def __init__(self, config: ReceiversConfig, intake: Intake, *, health: Health, clock: Clock) -> None:
        self.grpc_port = 0
        self.http_port = 0
        self._health = health
        tls = TlsFiles(config.tls, clock) if config.tls.cert_file else None
        tokens = TokenFile(config.token_file, "receivers.token_file", clock) if config.token_file else None
        accepts = tokens.accepts if tokens is not None else None
        offer = WatchedOffer(intake.offer, clock, lambda: health.check_in(GRPC_NAME))
        self.grpc = OtlpGrpcReceiver(
            config.grpc,
            offer,
            credentials=tls.grpc_credentials() if tls is not None else None,
            accepts=accepts,
            turn_away=intake.turn_away,
            clock=clock,
            check_in=offer.check_in,
        )
        self.http: OtlpHttpReceiver | None = None
        if config.http.enabled:
            offer = WatchedOffer(intake.offer, clock, lambda: health.check_in(HTTP_NAME))
            self.http = OtlpHttpReceiver(
                config.http,
                offer,
                context=tls.context if tls is not None else None,
                accepts=accepts,
                turn_away=intake.turn_away,
                check_in=offer.check_in,
            )

    def start(self) -> None:
        """Take the ports, or raise StartError; from then on they have to check in."""
        self.grpc_port = self.grpc.start()
        self._health.register(GRPC_NAME, CHECK_IN_TIMEOUT_S)
        if self.http is not None:
            self.http_port = self.http.start()
            self._health.register(HTTP_NAME, CHECK_IN_TIMEOUT_S)

    def stop(self, grace_s: float) -> None:
        """No new calls; those in flight get ``grace_s`` together."""
        self._health.unregister(GRPC_NAME)
        self._health.unregister(HTTP_NAME)
        if self.http is not None:
            self.http.stop(grace_s / 2)
            grace_s /= 2
        self.grpc.stop(grace_s)
