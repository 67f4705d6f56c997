"""Every key of the configuration: type, bounds, default and meaning, in one flat table; units stand last in a name.

What nobody can choose better than we can is no key: a class variable of :class:`Config` where several rooms read it, a
constant where one does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

_HOST: Final = r"(\[[0-9A-Fa-f:.]+(%\w+)?\]|[^\s/?#@:\[\]=.,][^\s/?#@:\[\]=,]*)"
_LARGE_PORT: Final = r"[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_PORT: Final = rf":([0-9]{{1,4}}|{_LARGE_PORT})"
_HOST_PORT: Final = rf"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+){_PORT}$"
_PAGE: Final = r"(/[^\s#?,]*(\?[^\s#]*)?)?"
_PAGE_URL: Final = rf"https?://{_HOST}({_PORT})?{_PAGE}"
_OWNER: Final = r"([^=\s]{1,256}=)?"
_ZMQ: Final = rf"(tcp://\S+:([1-9][0-9]{{0,3}}|{_LARGE_PORT})|(ipc|inproc)://\S+)"

HostPort = Annotated[str, Meta(pattern=_HOST_PORT, title="host:port or [v6]:port, port 0 takes a free one")]
HostPortOrNone = Annotated[str, Meta(pattern=f"^$|{_HOST_PORT}", title="host:port or [v6]:port, or empty")]
ScrapeUrl = Annotated[
    str,
    Meta(
        pattern=rf"^((dns\+)?{_PAGE_URL}|{_HOST}{_PORT}{_PAGE})$",
        max_length=512,
        title="http(s)://host:port/path or dns+http(s)://host:port/path",
    ),
]
KvAddress = Annotated[str, Meta(pattern=rf"^{_OWNER}{_ZMQ}$", max_length=512, title="[instance=]tcp://host:port")]
ForwardUrl = Annotated[
    str,
    Meta(
        pattern=rf"^$|^(grpcs?|https?)://{_HOST}({_PORT})?(/[^\s#?]*)?$",
        title="grpc(s)://host:port or http(s)://host:port/path",
    ),
]
FpmAddress = Annotated[
    str,
    Meta(pattern=rf"^{_OWNER}(gpu\+)?{_ZMQ}$", max_length=512, title="[instance=][gpu+]tcp://host:port"),
]
DiscoverUrl = Annotated[
    str, Meta(pattern=rf"^{_OWNER}https?://[^\s/?#]+/?$", max_length=512, title="[instance=]http(s)://host:port")
]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite number: no key takes YAML's .nan and .inf."""
Whole = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer of 64 bits, as a checkpoint holds them; YAML's integers have no bound."""


class Endpoint(NamedTuple):
    """Where a server listens."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


def is_endpoint(text: str) -> bool:
    """Whether it is a ``host:port``."""
    return re.search(_HOST_PORT, text) is not None


def parse_endpoint(text: str) -> Endpoint:
    """Split a checked ``host:port``."""
    address, _, port = text.rpartition(":")
    return Endpoint(address.strip("[]"), int(port))


class Owned(NamedTuple):
    """An address to listen to or to ask, and its engines: an instance, or a pattern of instances."""

    address: str
    instance: str


def parse_owned(text: str) -> Owned:
    """Split a checked ``[instance=]scheme://address``."""
    before, scheme, rest = text.partition("://")
    instance, _, kind = before.rpartition("=")
    return Owned(f"{kind}{scheme}{rest}", instance)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is true of the engines that match; a later rule wins over an earlier one."""

    match: Annotated[
        dict[str, str],
        Meta(description="Attributes of an engine, each with a pattern (`*`, `?`) to match; empty: every engine."),
    ] = msgspec.field(default_factory=dict)
    facts: Annotated[
        dict[str, str | Whole | Finite | bool],
        Meta(
            description="Attributes that such an engine then has: `model`, `gpu`, `tensor_parallel_size`, …, and"
            " `model_config`, the path of its model's `config.json`."
        ),
    ] = msgspec.field(default_factory=dict)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be configured."""

    profile: Annotated[
        Literal["sidecar", "gateway", "bulk"],
        Meta(
            description="Which defaults hold: `sidecar`, for the engines of one pod; `gateway`, for up to 500 engines"
            " in one process (give it 2 GiB); `bulk`, for learning from recordings as fast as one core can."
        ),
    ] = "sidecar"

    model: Annotated[str, Meta(max_length=256, description="Model of engines that do not tell it.")] = ""
    gpu: Annotated[str, Meta(max_length=256, description="GPU of engines that do not tell it, such as `H100`.")] = ""
    model_config: Annotated[
        str,
        Meta(description="Path of the model's `config.json`; feature sets such as `physics` need the model's shape."),
    ] = ""
    rules: Annotated[
        tuple[Rule, ...],
        Meta(
            max_length=1000, description="Attributes of engines by pattern, where one `model` and `gpu` is not enough."
        ),
    ] = ()
    discover: Annotated[
        tuple[DiscoverUrl, ...],
        Meta(
            max_length=16,
            description="vLLM servers to ask for model, version and limits. `instance=` is the pattern of the engines"
            " that the answer is about; without it, of all.",
        ),
    ] = ()

    listen: Annotated[HostPort, Meta(description="Where OTLP over gRPC is received.")] = "127.0.0.1:4317"
    listen_http: Annotated[
        HostPortOrNone, Meta(description="Where OTLP over HTTP is received, protobuf and JSON; empty: nowhere.")
    ] = "127.0.0.1:4318"
    message_max_mib: Annotated[
        int, Meta(ge=1, le=1024, description="Size of one export, uncompressed; a larger one is refused.")
    ] = 8
    token_file: Annotated[
        str, Meta(description="Who sends has to show a token of this file (`Authorization: Bearer`).")
    ] = ""
    tls_cert_file: Annotated[
        str, Meta(description="Certificate chain of both receivers (PEM); with it they speak TLS only.")
    ] = ""
    tls_key_file: Annotated[str, Meta(description="Private key of `tls_cert_file` (PEM).")] = ""
    tls_client_ca_file: Annotated[
        str, Meta(description="Authority that signs the certificates which clients must then show (PEM).")
    ] = ""

    forward: Annotated[
        ForwardUrl,
        Meta(
            description="Where telemetry is passed on to as it came, `grpc://host:4317` or `http://host:4318`, with `s`"
            " over TLS; empty: nowhere. Metrics and logs are taken only then, to be passed on."
        ),
    ] = ""
    forward_drop_scopes: Annotated[
        tuple[str, ...],
        Meta(
            max_length=16,
            description="Scopes whose spans stay here: the events of single steps are of no use to a backend.",
        ),
    ] = ("vllm.scheduler.step",)
    forward_headers_file: Annotated[
        str, Meta(description="File of headers for the backend, a line `name: value` each.")
    ] = ""

    scrape: Annotated[
        tuple[ScrapeUrl, ...],
        Meta(
            max_length=256,
            description="Pages of metrics to read; an address alone means its `/metrics`. `dns+http://` reads the pages"
            " of all addresses behind the name.",
        ),
    ] = ()
    scrape_interval_s: Annotated[
        float,
        Meta(ge=0.05, le=3_600, description="Seconds between two pages of a server; failures make it longer."),
    ] = 1.0
    scrape_token_file: Annotated[
        str, Meta(description="File of the token that scraped servers are shown (`Authorization: Bearer`).")
    ] = ""
    kv: Annotated[
        tuple[KvAddress, ...],
        Meta(
            max_length=64,
            description="Publishers of KV-cache events (ZMQ), one for each data-parallel rank. `instance=` is the"
            " `service.instance.id` of the engine; without it, the only engine there is.",
        ),
    ] = ()
    fpm: Annotated[
        tuple[FpmAddress, ...],
        Meta(
            max_length=64,
            description="Publishers of ForwardPassMetrics (ZMQ), one for each data-parallel rank. `instance=` names the"
            " engine; without it, its worker does. `gpu+` says that `wall_time` is the time of the GPU alone, `ipc://`"
            " too.",
        ),
    ] = ()

    ca_file: Annotated[
        str,
        Meta(
            description="Authorities of `https` servers that are scraped or asked who they are, and of the backend that"
            " telemetry is passed on to (PEM); empty: those of the system."
        ),
    ] = ""

    pages: Annotated[HostPort, Meta(description="Where metrics, health, snapshot and status page are served.")] = (
        "0.0.0.0:9464"  # read-only pages; Prometheus sits in another pod
    )
    pages_token_file: Annotated[
        str, Meta(description="With it, every page but metrics and health asks for a token of this file.")
    ] = ""
    pages_state: Annotated[
        bool, Meta(description="Serve the newest checkpoint at `/state`, for `tracefit fleet pull`.")
    ] = False
    itl_ms: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=60_000)], ...],
        Meta(
            max_length=3,
            description="Targets of the mean time between tokens: `tracefit_slo_concurrency` is how many requests fit.",
        ),
    ] = ()
    publish_interval_s: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3_600,
            description="Pause between two snapshots; at least ten times what making one takes.",
        ),
    ] = 5.0

    directory: Annotated[str, Meta(description="Where snapshot, checkpoints and log go; one process each.")] = (
        "snapshots"
    )
    durability: Annotated[
        Literal["memory", "log"],
        Meta(description="What a kill loses: `memory`, what came after the last checkpoint; `log`, nothing."),
    ] = "memory"
    checkpoint_interval_s: Annotated[
        float, Meta(ge=0.1, le=86_400, description="Pause between two checkpoints (`state.bin`).")
    ] = 60.0
    log_capacity_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Size of the log; at most a third of what its volume has room for."
            " When it is full, exports are refused until a checkpoint is written.",
        ),
    ] = 256

    memory_limit_mib: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Resident memory at which exports are refused; 0: 80 % of the cgroup's limit, if it has one.",
        ),
    ] = 0
    queue_mib: Annotated[
        float,
        Meta(
            ge=0.0625,
            le=16_384,
            description="Exports that may wait for the worker; beyond it senders have to try again.",
        ),
    ] = 16.0
    engines_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Engines held, and configurations learned, at once. A newcomer is refused while all are alive.",
        ),
    ] = 64
    allowed_lateness_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="How long after its end a span may arrive; one that is later is not used."),
    ] = 20.0
    idle_timeout_s: Annotated[
        float,
        Meta(ge=1, le=86_400, description="After so long without telemetry, what an engine sent is used as it is."),
    ] = 20.0
    join_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="How long a step waits for the journeys of its requests; then it is used with what is known.",
        ),
    ] = 180.0

    learners: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=16,
            description="What learns side by side: `rls`, and River models by name, such as `river:residual`.",
        ),
    ] = ("rls", "river:residual")
    feature_sets: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=32,
            description="Modelling systems that are learned side by side (docs/systems.md).",
        ),
    ] = ("portable", "physics")
    custom: Annotated[
        dict[str, tuple[str, ...]],
        Meta(description="Columns of the feature set `custom`, for each target (docs/systems.md lists them)."),
    ] = msgspec.field(default_factory=dict)
    detector: Annotated[
        str,
        Meta(
            description="What finds a change of speed: `cusum`, `adwin`, `page_hinkley` or `none`. With `none`,"
            " coefficients follow a change as slowly as the rarest kind of step is forgotten."
        ),
    ] = "cusum"
    donors: Annotated[
        tuple[str, ...],
        Meta(
            max_length=256,
            description="Checkpoints, or directories of them, whose coefficients new configurations start from.",
        ),
    ] = ()

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least important messages that are logged.")
    ] = "info"
    drain_s: ClassVar[float] = 10.0
    """At a stop, how long accepted exports may still be learned from. It fits a pod's grace period of 30 s."""
    steps_max: ClassVar[int] = 65_536
    """Steps held per engine process; beyond it the oldest are used with what is known."""
    requests_max: ClassVar[int] = 20_000
    """Finished requests and API spans waiting for their other half, per engine."""
    page_engines_max: ClassVar[int] = 1024
    """Engines known by their pages alone."""
    row_steps_max: ClassVar[int] = 512
    """Longest interval of steps that still gives a row: long ones sum their stalls."""
    warm_up_rows: ClassVar[int] = 64
    """Rows of a new engine process held until its one-time compilation can be told from its pace."""

    @property
    def configs_max(self) -> int:
        """Configurations learned at once: every engine may have its own."""
        return self.engines_max

    @property
    def block_s(self) -> float:
        """Event time that is learned at once: larger is cheaper and reacts later."""
        return 60.0 if self.profile == "bulk" else 1.0

    @property
    def block_rows(self) -> int:
        """Rows after which a block is learned although ``block_s`` has not passed.

        The wall's accuracy was measured with both numbers.
        """
        return 8_192 if self.profile == "bulk" else 512

    @property
    def lateness_ns(self) -> int:
        """``allowed_lateness_s`` in nanoseconds."""
        return int(self.allowed_lateness_s * 1e9)

    @property
    def timeout_ns(self) -> int:
        """``join_timeout_s`` in nanoseconds."""
        return int(self.join_timeout_s * 1e9)


PROFILES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "sidecar": {},
        # bounds for many engines, and less often what grows with their number
        "gateway": {"queue_mib": 64.0, "engines_max": 500, "publish_interval_s": 15.0, "checkpoint_interval_s": 300.0},
        # one learner, one feature set, large blocks; changes of speed are looked for, as a history has them
        "bulk": {"learners": ("rls",), "feature_sets": ("portable",)},
    }
)
"""The defaults that a profile changes."""
