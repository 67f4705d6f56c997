"""Every key of the configuration, with its type, bounds and meaning; units stand last in every name.

What nobody can choose better than we can is a constant where it is used, or a class variable of the section that its
readers are given.
"""

from __future__ import annotations

import re
import sys
import urllib.parse
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of the configuration; a copy of what holds it copies the reference."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


def entry_of(kind: Any) -> type[Section] | None:
    """The section that a type holds as its entries, as a list of sections does."""
    for each in get_args(kind):
        if isinstance(each, type) and issubclass(each, Section):
            return each
        if (entry := entry_of(each)) is not None:
            return entry
    return None


Bound = Annotated[int, Meta(ge=1, le=10_000_000)]
Mebibytes = Annotated[int, Meta(ge=1, le=1024)]


class Endpoint(NamedTuple):
    """Where a server listens."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


_HOST_PORT = (
    r"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)"
    r":([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
)


HostPort = Annotated[str, Meta(pattern=_HOST_PORT, title="host:port or [v6]:port; port 0 takes a free one")]


def is_endpoint(text: str) -> bool:
    """Whether it is a ``host:port``."""
    return re.search(_HOST_PORT, text) is not None


def parse_endpoint(text: str) -> Endpoint:
    """Split a checked ``host:port``."""
    address, _, port = text.rpartition(":")
    return Endpoint(address.strip("[]"), int(port))


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


class HttpReceiverConfig(Section, frozen=True, kw_only=True):
    """OTLP/HTTP, protobuf and JSON."""

    enabled: Annotated[bool, Meta(description="Receive OTLP over HTTP at all.")] = True
    endpoint: Annotated[HostPort, Meta(description="Where OTLP over HTTP is received, protobuf and JSON.")] = (
        "127.0.0.1:4318"
    )
    max_request_body_size_mib: Annotated[
        Mebibytes, Meta(description="Size of one export, uncompressed; a larger one is refused.")
    ] = 8


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS of both OTLP receivers; a client CA makes it mutual. Files may be replaced while we run."""

    cert_file: Annotated[
        str, Meta(description="Certificate chain of both receivers (PEM); with it they speak TLS only.")
    ] = ""
    key_file: Annotated[str, Meta(description="Its private key (PEM).")] = ""
    client_ca_file: Annotated[
        str, Meta(description="Who signs the certificates that clients must then show (PEM).")
    ] = ""


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
    interval_min_s: ClassVar[float] = 0.25
    """Shortest pause between two pages of one server."""
    timeout_s: Annotated[float, Meta(gt=0, le=60, description="How long a page may take.")] = 2.0
    refresh_s: ClassVar[float] = 30.0
    """How often names and files are looked at again."""
    servers_max: ClassVar[int] = 256
    """Servers asked, of all targets together."""
    threads: ClassVar[int] = 4
    """Pages asked for at once."""
    queue_pages: ClassVar[int] = 1024
    """Pages that wait for the worker; beyond it the oldest go, counted."""
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


Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""YAML knows .nan and .inf; of no knob are they a value."""


Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""YAML's integers have no end; those of a state file have."""


class RuleConfig(Section, frozen=True, kw_only=True):
    """What is true of engines that match; later rules win."""

    match: Annotated[
        dict[str, str],
        Meta(description="Facts of an engine and the pattern (`*`, `?`) that each has to match; empty: all."),
    ] = msgspec.field(default_factory=dict)
    facts: Annotated[
        dict[str, str | Whole | Finite | bool],
        Meta(description="What is then known of the engine: `model`, `gpu`, `tensor_parallel_size`, …"),
    ] = msgspec.field(default_factory=dict)
    model_config: Annotated[str | None, Meta(description="Path of its model's `config.json`, for `physics`.")] = None


class DiscoveryEndpoint(Section, frozen=True, kw_only=True):
    """A vLLM server to ask about itself."""

    url: Annotated[
        str,
        Meta(pattern=r"^https?://[^\s/?#]+/?$", max_length=256, description="Where its API is, without a path."),
    ]
    instance: Annotated[str, Meta(description="Engines it answers for, by a pattern of their instance.")] = "*"


class DiscoveryConfig(Section, frozen=True, kw_only=True):
    """Which servers to ask what they are, and how patiently."""

    endpoints: Annotated[
        tuple[DiscoveryEndpoint, ...], Meta(max_length=16, description="Servers to ask for model, version and limits.")
    ] = ()


class ConfigurationsConfig(Section, frozen=True, kw_only=True):
    """Who the engines are, where they do not say it themselves."""

    rules: Annotated[
        tuple[RuleConfig, ...], Meta(max_length=1000, description="Facts about engines by pattern, see below.")
    ] = ()
    model_config: Annotated[
        str | None, Meta(description="Path of a model's `config.json`, for engines of which no rule names one.")
    ] = None
    hardware_file: Annotated[
        str | None, Meta(description="Path of your own data sheets of GPUs, beside those that come along.")
    ] = None
    discovery: DiscoveryConfig = DiscoveryConfig()


class JoinConfig(Section, frozen=True, kw_only=True):
    """How long a row waits for the journeys that complete it, and what may be held meanwhile.

    Times are event time: what the telemetry says, never when it was processed.
    """

    window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="How long a step waits for the journeys of its requests; then it is used with what is known.",
        ),
    ] = 180.0
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="How late a span may arrive after its end: batching of 5 s, retries, reordering.",
        ),
    ] = 20.0
    idle_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="After so long without telemetry, an engine is waited for no longer: what it holds is emitted.",
        ),
    ] = 20.0
    steps_max: ClassVar[int] = 65_536
    """Steps held per engine process; beyond it the oldest are used with what is known."""
    requests_max: ClassVar[int] = 20_000
    """Finished requests and API spans waiting for their other half, per engine."""
    engines_max: Annotated[
        Bound, Meta(description="Engines held; one silent for `join.window_s` makes room, else a newcomer is refused.")
    ] = 64
    page_engines_max: ClassVar[int] = 1024
    """Engines known by their pages alone; the one not scraped for longest makes room."""
    row_steps_max: ClassVar[int] = 512
    """Longest interval of steps that still gives a row: long ones sum their stalls."""
    warm_up_rows: ClassVar[int] = 64
    """Rows of a new engine process held until its one-time compilation can be told from its pace."""
    block_steps: Annotated[
        int,
        Meta(
            ge=256,
            le=65_536,
            description="Steps after which what they taught of their engine holds: larger is cheaper and reacts later.",
        ),
    ] = 512


class BankConfig(Section, frozen=True, kw_only=True):
    """Bounds of the learners."""

    block_rows: Annotated[
        Bound, Meta(description="Rows after which a block is learned, at most: larger is cheaper and reacts later.")
    ] = 512
    block_s: Annotated[
        float, Meta(ge=0.001, le=3_600, description="Event time after which a block is learned, at the latest.")
    ] = 1.0
    detector: Annotated[
        str,
        Meta(
            description="What tells a change of speed: `cusum`, `adwin`, `page_hinkley` or `none`. With `none`"
            " coefficients follow one as slowly as the rarest kind of step forgets."
        ),
    ] = "cusum"
    river_rows_per_s: ClassVar[float] = 32.0
    """Rows per second of event time that each River model sees of a target: bounds its cost."""
    configs_max: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Configurations learned at once; a newcomer is refused while all are alive."),
    ] = 64


class MemoryConfig(Section, frozen=True, kw_only=True):
    """Exports are refused while the process uses more; 0 means 80 % of the cgroup's limit, if it has one."""

    limit_mib: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Resident memory at which exports are refused; 0: 80 % of the cgroup's limit, if it has one.",
        ),
    ] = 0


class QueueConfig(Section, frozen=True, kw_only=True):
    """Between the receivers and the worker. Bytes count until they are learned from."""

    capacity_bytes: Annotated[
        int,
        Meta(
            ge=65_536,
            le=2**34,
            description="Bytes that may wait for the worker; beyond it senders are told to try again.",
        ),
    ] = 16 * 2**20


class HttpConfig(Section, frozen=True, kw_only=True):
    """The server of metrics, health, snapshot and status page."""

    endpoint: Annotated[HostPort, Meta(description="Where metrics, health, snapshot and status page are served.")] = (
        "0.0.0.0:9464"  # read-only pages; Prometheus sits in another pod
    )
    token_file: Annotated[
        str, Meta(description="With it, everything but metrics and health asks for a token of this file.")
    ] = ""
    state: Annotated[
        bool, Meta(description="Serve `/state`, what the newest state file knows, for `tracefit fleet pull`.")
    ] = False


class ExportersConfig(Section, frozen=True, kw_only=True):
    """The ways in which what was learned leaves the process."""

    http: HttpConfig = HttpConfig()


class SnapshotConfig(Section, frozen=True, kw_only=True):
    """The published coefficients: how often a new generation, where and how often on disk."""

    directory: Annotated[str, Meta(description="Where snapshot, checkpoints and log go; one process each.")] = (
        "snapshots"
    )
    publish_interval_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3_600,
            description="Pause between two generations of what is served; ten times what making one takes, at least.",
        ),
    ] = 5.0


class StateConfig(Section, frozen=True, kw_only=True):
    """``state.bin`` beside the snapshot: how often, and after how long learning nothing is called a stall."""

    interval_s: Annotated[
        float,
        Meta(
            ge=0.1,
            le=86_400,
            description="Pause between two checkpoints (`state.bin`): what a kill may lose without a log.",
        ),
    ] = 60.0


class LogConfig(Section, frozen=True, kw_only=True):
    """Where ``durability: log`` keeps what was acknowledged, in the snapshot's directory."""

    capacity_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Size of the log; less where its volume has no room for it beside three checkpoints. "
            "When it is full, exports are refused until a checkpoint is written.",
        ),
    ] = 256


ItlTarget = Annotated[float, Meta(gt=0, le=60_000)]


class SloConfig(Section, frozen=True, kw_only=True):
    """Targets that the advisory metrics are given for; they change nothing that is learned."""

    itl_ms: Annotated[
        tuple[ItlTarget, ...],
        Meta(
            max_length=3,
            description="Mean times between tokens: `tracefit_slo_concurrency` says how many requests fit each.",
        ),
    ] = ()


class ShutdownConfig(Section, frozen=True, kw_only=True):
    """Budget of a graceful stop; it has to fit the pod's terminationGracePeriodSeconds."""

    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=300,
            description="How long what was accepted may still be learned from; then the last state is written.",
        ),
    ] = 5.0


class StartConfig(Section, frozen=True, kw_only=True):
    """What becomes of a start whose configuration is wrong.

    ``exit``: exit code 78 and one sentence. ``degrade``: the process starts with the defaults and those environment
    variables that can be used. If the file is no YAML, ``TRACEFIT_CONFIG__ON_ERROR`` still says which.
    """

    on_error: Annotated[
        Literal["exit", "degrade"],
        Meta(description="`exit`: exit code 78, one sentence; `degrade`: the defaults hold."),
    ] = "exit"


class Config(Section, frozen=True, kw_only=True):
    """Everything that can be configured."""

    config: StartConfig = StartConfig()
    receivers: ReceiversConfig = ReceiversConfig()
    queue: QueueConfig = QueueConfig()
    memory: MemoryConfig = MemoryConfig()
    exporters: ExportersConfig = ExportersConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    durability: Annotated[
        Literal["memory", "log"],
        Meta(description="`memory`: a kill loses what came after the last checkpoint; `log`: nothing."),
    ] = "memory"
    state: StateConfig = StateConfig()
    log: LogConfig = LogConfig()
    join: JoinConfig = JoinConfig()
    bank: BankConfig = BankConfig()
    slo: SloConfig = SloConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    configurations: ConfigurationsConfig = ConfigurationsConfig()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important messages that are logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines for people, or one JSON object per line.")
    ] = "text"
    donors: Annotated[
        tuple[str, ...],
        Meta(
            max_length=256,
            description="State files, or directories of them, whose coefficients new configurations start from.",
        ),
    ] = ()
    learners: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=16,
            description="What learns beside each other: `rls`, and River models by name, such as `river:residual`.",
        ),
    ] = ("rls", "river:residual")
    feature_sets: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=32,
            description="Which modelling systems are learned beside each other (docs/systems.md).",
        ),
    ] = ("portable", "physics")
    custom: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="Columns of the set `custom`, per target: names from the list of columns in docs/systems.md."),
    ] = msgspec.field(default_factory=dict)
