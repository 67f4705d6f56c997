"""The OTLP receivers, made from the configuration; each is part of health under its own name from start to stop."""

from __future__ import annotations

import ipaddress
import logging
from typing import NamedTuple

from collector.config import ConfigError, ReceiversConfig, parse_endpoint
from collector.ingest.access import TlsFiles, TokenFile
from collector.ingest.intake import Intake
from collector.runtime import Clock, Health
from collector.runtime.http import HttpServer
from collector.telemetry import Transport

from .otlp_grpc import OtlpGrpcReceiver
from .otlp_http import make_http_receiver
from .way_in import WayIn

_log = logging.getLogger(__name__)


class Receivers(NamedTuple):
    """Either has its ``port`` after its start; HTTP can be switched off."""

    grpc: OtlpGrpcReceiver
    http: HttpServer | None


def read_credentials(config: ReceiversConfig, clock: Clock) -> tuple[TlsFiles | None, TokenFile | None]:
    """What closes the receivers; a ConfigError names what is asked for and cannot be read."""
    if not config.tls.cert_file and (config.tls.key_file or config.tls.client_ca_file):
        raise ConfigError("receivers.tls.cert_file", "has to be given with key_file or client_ca_file")
    tls = TlsFiles(config.tls, clock) if config.tls.cert_file else None
    return tls, TokenFile(config.token_file, "receivers.token_file", clock) if config.token_file else None


def make_receivers(
    config: ReceiversConfig, intake: Intake, *, health: Health, clock: Clock, grace_s: float
) -> Receivers:
    """The receivers that the configuration asks for; calls in flight get ``grace_s`` together when they stop."""
    tls, tokens = read_credentials(config, clock)
    if tls is None and tokens is None:
        _warn_of_open_ports(config)
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
            clock=clock,
            grace_s=grace_s,
            tls=tls.context if tls is not None else None,
        )
        if config.http.enabled
        else None
    )
    return Receivers(grpc, http)


def _warn_of_open_ports(config: ReceiversConfig) -> None:
    listening = {"receivers.grpc.endpoint": config.grpc.endpoint}
    if config.http.enabled:
        listening["receivers.http.endpoint"] = config.http.endpoint
    open_ports = [f"{k}: {at}" for k, at in listening.items() if not _is_loopback(parse_endpoint(at).address)]
    if open_ports:  # one line: a second one of the same text would be held back
        _log.warning("open to anybody: %s; set receivers.token_file or receivers.tls", ", ".join(open_ports))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
