"""Keys of the ways in: OTLP receivers, KV events, pages that are scraped."""

from __future__ import annotations

import urllib.parse
from typing import Annotated, Literal

from msgspec import Meta

from .section import HostPort, Mebibytes, Section

Address = Annotated[str, Meta(pattern=r"^((tcp|ipc|inproc)://.+)?$", title="tcp://host:port or ipc://path")]


class KvEndpoint(Section, frozen=True, kw_only=True):
    """One publisher (a data-parallel rank): where it publishes, and whose events these are."""

    endpoint: Annotated[Address, Meta(min_length=1, description="Where it publishes.")]
    instance: Annotated[
        str,
        Meta(
            max_length=256,
            description="`service.instance.id` of the engine whose events these are; empty: of the only engine.",
        ),
    ] = ""
    topic: Annotated[str, Meta(max_length=256, description="Only events of this topic; empty: all.")] = ""


class KvConfig(Section, frozen=True, kw_only=True):
    """KV-cache events over ZMQ; nothing is opened without endpoints."""

    endpoints: Annotated[
        tuple[KvEndpoint, ...],
        Meta(max_length=64, description="Publishers of KV-cache events to listen to, one per data-parallel rank."),
    ] = ()


class GrpcConfig(Section, frozen=True, kw_only=True):
    """The receiver of OTLP over gRPC."""

    endpoint: Annotated[HostPort, Meta(description="Where OTLP over gRPC is received.")] = "127.0.0.1:4317"
    max_recv_msg_size_mib: Annotated[
        Mebibytes, Meta(description="Size of one export, uncompressed; a larger one is refused.")
    ] = 8
    max_connections: Annotated[
        int, Meta(ge=2, le=65_536, description="Connections open at once; a newcomer beyond it is closed.")
    ] = 256
    max_concurrent_streams: Annotated[
        int, Meta(ge=1, le=100_000, description="Calls open at once on one connection.")
    ] = 8
    threads: Annotated[int, Meta(ge=3, le=256, description="Exports handled at once.")] = 8
    receive_timeout_s: Annotated[
        float, Meta(ge=0.1, le=300, description="How long the message of a call may take to come.")
    ] = 10.0
    max_connection_idle_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Connections without a call for so long are closed; 0: never. It names senders without an id.",
        ),
    ] = 600.0


class HttpReceiverConfig(Section, frozen=True, kw_only=True):
    """OTLP/HTTP, protobuf and JSON."""

    enabled: Annotated[bool, Meta(description="Receive OTLP over HTTP at all.")] = True
    endpoint: Annotated[HostPort, Meta(description="Where OTLP over HTTP is received, protobuf and JSON.")] = (
        "127.0.0.1:4318"
    )
    max_request_body_size_mib: Annotated[
        Mebibytes, Meta(description="Size of one export, uncompressed; a larger one is refused.")
    ] = 8
    max_connections: Annotated[
        int, Meta(ge=2, le=1024, description="Connections open at once; a newcomer beyond it is closed.")
    ] = 64
    timeout_s: Annotated[float, Meta(ge=0.1, le=300, description="How long a request may take to come.")] = 10.0


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of both OTLP receivers; a client CA makes it mutual. Files may be replaced while we run."""

    cert_file: Annotated[
        str, Meta(description="Certificate chain of both receivers (PEM); with it they speak TLS only.")
    ] = ""
    key_file: Annotated[str, Meta(description="Its private key (PEM).")] = ""
    client_ca_file: Annotated[
        str, Meta(description="Who signs the certificates that clients must then show (PEM).")
    ] = ""
    reload_interval_s: Annotated[
        float, Meta(ge=0.1, le=86_400, description="How often the files are looked at for changes.")
    ] = 10.0


class ScrapeEndpoint(Section, frozen=True, kw_only=True):
    """A server's page. ``resolve: all`` asks every address behind the name, as of a headless Service."""

    url: Annotated[
        str,
        Meta(
            pattern=r"^https?://(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/[^\s#]*)?$",
            max_length=512,
            description="The page; an address alone means its `/metrics`.",
        ),
    ]
    resolve: Annotated[
        Literal["one", "all"],
        Meta(
            description="`all`: ask every address behind the name, as of a headless Service; `one`: the name as it is."
        ),
    ] = "one"

    def __post_init__(self) -> None:
        """ValueError for a port or an IPv6 address that is none."""
        _ = urllib.parse.urlsplit(self.url).port


class ScrapeConfig(Section, frozen=True, kw_only=True):
    """Servers' own pages of counters: needs nothing of them but their port. Nothing is asked without a target."""

    endpoints: Annotated[tuple[ScrapeEndpoint, ...], Meta(max_length=256, description="Pages to read.")] = ()
    files: Annotated[
        tuple[str, ...],
        Meta(max_length=16, description="Targets in Prometheus's file discovery format, read again while running."),
    ] = ()
    interval_s: Annotated[
        float,
        Meta(
            ge=0.05, le=3_600, description="Longest pause between two pages of one server; fast steps make it shorter."
        ),
    ] = 1.0
    interval_min_s: Annotated[
        float, Meta(ge=0.05, le=3_600, description="Shortest pause between two pages of one server.")
    ] = 0.25
    timeout_s: Annotated[float, Meta(gt=0, le=60, description="How long a page may take.")] = 2.0
    refresh_s: Annotated[float, Meta(ge=1, le=86_400, description="How often names and files are looked at again.")] = (
        30.0
    )
    servers_max: Annotated[int, Meta(ge=1, le=1024, description="Servers asked, of all targets together.")] = 256
    threads: Annotated[int, Meta(ge=1, le=64, description="Pages asked for at once.")] = 4
    queue_pages: Annotated[
        int, Meta(ge=1, le=100_000, description="Pages that wait for the worker; beyond it the oldest go, counted.")
    ] = 1024
    token_file: Annotated[str, Meta(description="Its token goes into `Authorization: Bearer`.")] = ""
    ca_file: Annotated[
        str, Meta(description="Who signs the certificates of `https` targets; empty: whom the system trusts.")
    ] = ""
    insecure_skip_verify: Annotated[bool, Meta(description="Take any certificate of an `https` target.")] = False


class ReceiversConfig(Section, frozen=True, kw_only=True):
    """Ways in. With a token file both ask for ``Authorization: Bearer``."""

    grpc: GrpcConfig = GrpcConfig()
    http: HttpReceiverConfig = HttpReceiverConfig()
    kv: KvConfig = KvConfig()
    scrape: ScrapeConfig = ScrapeConfig()
    tls: TlsConfig = TlsConfig()
    token_file: Annotated[
        str, Meta(description="With it both receivers ask for `Authorization: Bearer` and a token of this file.")
    ] = ""
