"""The OTLP receivers, made from the configuration; each is part of health under its own name from start to stop."""

from __future__ import annotations

from typing import NamedTuple

from collector.config import ReceiversConfig
from collector.receive.auth import TokenFile
from collector.receive.intake import Intake
from collector.receive.tls import TlsFiles
from collector.runtime import Clock, Health
from collector.runtime.http import HttpServer
from collector.telemetry import Transport

from .otlp_grpc import OtlpGrpcReceiver
from .otlp_http import make_http_receiver
from .way_in import WayIn


class Receivers(NamedTuple):
    """Either has its ``port`` after its start; HTTP can be switched off."""

    grpc: OtlpGrpcReceiver
    http: HttpServer | None


def make_receivers(
    config: ReceiversConfig, intake: Intake, *, health: Health, clock: Clock, grace_s: float
) -> Receivers:
    """The receivers that the configuration asks for; calls in flight get ``grace_s`` together when they stop."""
    tls = TlsFiles(config.tls, clock) if config.tls.cert_file else None
    tokens = TokenFile(config.token_file, "receivers.token_file", clock) if config.token_file else None
    grace_s = grace_s / 2 if config.http.enabled else grace_s
    grpc = OtlpGrpcReceiver(
        config.grpc,
        WayIn(Transport.GRPC, intake, clock, tokens),
        health=health,
        clock=clock,
        grace_s=grace_s,
        credentials=tls.grpc_credentials() if tls is not None else None,
    )
    http = (
        make_http_receiver(
            config.http,
            WayIn(Transport.HTTP, intake, clock, tokens),
            health=health,
            grace_s=grace_s,
            tls=tls.context if tls is not None else None,
        )
        if config.http.enabled
        else None
    )
    return Receivers(grpc, http)
