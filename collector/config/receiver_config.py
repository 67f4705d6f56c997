"""Keys of the ways in: OTLP receivers, KV events, pages that are scraped."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .section import HostPort, Mebibytes, Section

Address = Annotated[
    str, msgspec.Meta(pattern=r"^((tcp|ipc|inproc)://.+)?$", description="tcp://host:port or ipc://path")
]


class KvEndpoint(Section, frozen=True, kw_only=True):
    """One publisher (a data-parallel rank): where it publishes and, if it does, where it replays."""

    endpoint: Annotated[Address, msgspec.Meta(min_length=1)]
    replay: Address = ""
    topic: Annotated[str, msgspec.Meta(max_length=256)] = ""


class KvConfig(Section, frozen=True, kw_only=True):
    """KV-cache events over ZMQ; nothing is opened without endpoints."""

    endpoints: Annotated[tuple[KvEndpoint, ...], msgspec.Meta(max_length=64)] = ()
    queue_batches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    """Batches that wait for the worker; beyond it the oldest go, counted."""
    message_bytes_max: Annotated[int, msgspec.Meta(ge=1024, le=2**30)] = 16 * 2**20
    """A larger message closes the connection (libzmq), which comes back by itself."""
    replay_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 10.0
    replay_pause_max_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 300.0


class GrpcConfig(Section, frozen=True, kw_only=True):
    """The receiver of OTLP over gRPC."""

    endpoint: HostPort = "127.0.0.1:4317"
    max_recv_msg_size_mib: Mebibytes = 32
    max_connections: Annotated[int, msgspec.Meta(ge=2, le=65_536)] = 256
    max_concurrent_streams: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 128
    threads: Annotated[int, msgspec.Meta(ge=3, le=256)] = 8
    receive_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 10.0
    max_connection_idle_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0
    """A connection without a call for so long is closed; 0: never. A sender without an instance id is known by it."""


class HttpReceiverConfig(Section, frozen=True, kw_only=True):
    """OTLP/HTTP, protobuf and JSON."""

    enabled: bool = True
    endpoint: HostPort = "127.0.0.1:4318"
    max_request_body_size_mib: Mebibytes = 32
    max_connections: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 64
    timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 10.0


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of both OTLP receivers; a client CA makes it mutual. Files may be replaced while we run."""

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    reload_interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 10.0


class ScrapeEndpoint(Section, frozen=True, kw_only=True):
    """A server's page. ``resolve: all`` asks every address behind the name, as of a headless Service."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#@]+(/[^\s#]*)?$", max_length=512)]
    resolve: Literal["one", "all"] = "one"


class ScrapeConfig(Section, frozen=True, kw_only=True):
    """Servers' own pages of counters: needs nothing of them but their port. Nothing is asked without a target."""

    endpoints: Annotated[tuple[ScrapeEndpoint, ...], msgspec.Meta(max_length=256)] = ()
    files: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()
    """Targets in Prometheus's file discovery format, read again while running."""
    interval_s: Annotated[float, msgspec.Meta(ge=0.05, le=3_600)] = 1.0
    """Longest pause between two pages of one server; fast steps make it shorter."""
    interval_min_s: Annotated[float, msgspec.Meta(ge=0.05, le=3_600)] = 0.25
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    refresh_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 30.0
    """How often names and files are looked at again."""
    servers_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 256
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    queue_pages: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1024
    """Pages that wait for the worker; beyond it the oldest go, counted."""
    token_file: str = ""
    """Its token goes into ``Authorization: Bearer``."""
    ca_file: str = ""
    """Who signs the certificates of ``https`` targets; empty: whom the system trusts."""
    insecure_skip_verify: bool = False


class ReceiversConfig(Section, frozen=True, kw_only=True):
    """Ways in. With a token file both ask for ``Authorization: Bearer``."""

    grpc: GrpcConfig = GrpcConfig()
    http: HttpReceiverConfig = HttpReceiverConfig()
    kv: KvConfig = KvConfig()
    scrape: ScrapeConfig = ScrapeConfig()
    tls: TlsConfig = TlsConfig()
    token_file: str = ""
