"""Configuration: defaults, YAML, environment; checked whole before anything starts.

Strongest first: ``TRACEFIT_<SECTION>__<KEY>`` variables (two underscores go one level down, values are YAML, so lists
work), the YAML file, the defaults here. Where the OpenTelemetry Collector has the same knob, the key has its name.
An unknown key, a key given twice or a value out of range is a :class:`ConfigError` with the key's path.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import yaml

from .errors import ConfigError
from .join.settings import Bound, DedupeSettings, JoinSettings
from .knowledge import ConfigurationsConfig
from .receivers.kv_zmq import KvSettings

ENV_PREFIX = "TRACEFIT_"
ENV_FILE = "TRACEFIT_CONFIG"
"""The one variable that is no key: the path of the configuration file."""

Mebibytes = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Endpoint(NamedTuple):
    """Where to listen."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


_HOST_PORT = (
    r"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)"
    r":([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
)
HostPort = Annotated[
    str, msgspec.Meta(pattern=_HOST_PORT, description="host:port or [v6]:port; port 0 takes a free one")
]


def parse_endpoint(text: str) -> Endpoint:
    """Split a checked ``host:port``."""
    address, _, port = text.rpartition(":")
    return Endpoint(address.strip("[]"), int(port))


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of the configuration."""


class GrpcConfig(_Section, frozen=True, kw_only=True):
    """OTLP/gRPC."""

    endpoint: HostPort = "127.0.0.1:4317"
    max_recv_msg_size_mib: Mebibytes = 32
    max_connections: Annotated[int, msgspec.Meta(ge=2, le=65_536)] = 256
    max_concurrent_streams: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 128
    threads: Annotated[int, msgspec.Meta(ge=3, le=256)] = 8
    receive_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 10.0


class HttpReceiverConfig(_Section, frozen=True, kw_only=True):
    """OTLP/HTTP, protobuf only."""

    enabled: bool = True
    endpoint: HostPort = "127.0.0.1:4318"
    max_request_body_size_mib: Mebibytes = 32
    max_connections: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 64
    timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=300)] = 10.0


class TlsConfig(_Section, frozen=True, kw_only=True):
    """TLS of both OTLP receivers; a client CA makes it mutual. Files may be replaced while we run."""

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    reload_interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 10.0


class ReceiversConfig(_Section, frozen=True, kw_only=True):
    """Ways in. With a token file both ask for ``Authorization: Bearer``."""

    grpc: GrpcConfig = GrpcConfig()
    http: HttpReceiverConfig = HttpReceiverConfig()
    kv: KvSettings = KvSettings()
    tls: TlsConfig = TlsConfig()
    token_file: str = ""


class MemoryConfig(_Section, frozen=True, kw_only=True):
    """Exports are refused while the process uses more; 0 means 80 % of the cgroup's limit, if it has one."""

    limit_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class QueueConfig(_Section, frozen=True, kw_only=True):
    """Between the receivers and the worker. Bytes count until they are learned from."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=2**34)] = 16 * 2**20
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=8)] = 2.0
    batch_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**30)] = 2 * 2**20


class HttpConfig(_Section, frozen=True, kw_only=True):
    """Metrics, health, snapshot."""

    endpoint: HostPort = "0.0.0.0:9464"  # read-only pages; Prometheus sits in another pod
    token_file: str = ""
    """With it, everything but metrics and health asks for a token of this file."""


class ExportersConfig(_Section, frozen=True, kw_only=True):
    """Ways out."""

    http: HttpConfig = HttpConfig()


class SnapshotConfig(_Section, frozen=True, kw_only=True):
    """The published coefficients: how often a new generation, where and how often on disk."""

    directory: str = "snapshots"
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 10.0
    publish_interval_s: Annotated[float, msgspec.Meta(ge=0.05, le=3_600)] = 5.0


class StateConfig(_Section, frozen=True, kw_only=True):
    """``state.bin`` beside the snapshot: how often, and after how long learning nothing is called a stall."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 60.0
    stalled_after_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0


class JournalConfig(_Section, frozen=True, kw_only=True):
    """Where ``durability: journal`` keeps what was acknowledged, in the snapshot's directory."""

    capacity_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    segment_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    fsync: bool = False
    """Survive the death of the node too, at the price of a disk flush per acknowledgement."""


class BankConfig(_Section, frozen=True, kw_only=True):
    """Bounds of the learners."""

    block_rows: Bound = 32
    block_s: Annotated[float, msgspec.Meta(ge=0.001, le=3_600)] = 1.0
    detector: str = "cusum"
    configs_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64


class ShutdownConfig(_Section, frozen=True, kw_only=True):
    """Budget of a graceful stop; it has to fit the pod's terminationGracePeriodSeconds."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 3.0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 5.0


class Config(_Section, frozen=True, kw_only=True):
    """Everything that can be configured."""

    receivers: ReceiversConfig = ReceiversConfig()
    queue: QueueConfig = QueueConfig()
    memory: MemoryConfig = MemoryConfig()
    exporters: ExportersConfig = ExportersConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    durability: Literal["memory", "journal"] = "memory"
    """``memory``: what is acknowledged and not in a saved state dies with the process. ``journal``: it does not."""
    state: StateConfig = StateConfig()
    journal: JournalConfig = JournalConfig()
    join: JoinSettings = JoinSettings()
    dedupe: DedupeSettings = DedupeSettings()
    bank: BankConfig = BankConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    configurations: ConfigurationsConfig = ConfigurationsConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reload_interval_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 10.0
    """How often the file is looked at for changes; 0: never."""
    donors: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    learners: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)] = ("rls", "river:linear")
    feature_sets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)] = ("portable", "physics")
    live_sets: Annotated[tuple[str, ...], msgspec.Meta(max_length=8)] = ("shape",)
    custom: dict[str, tuple[str, ...]] = {}


def fast(config: Config) -> Config:
    """The bulk profile: one learner, one feature set, large blocks and batches, no quick lane (so no drift alarm)."""
    return msgspec.structs.replace(
        config,
        learners=("rls",),
        feature_sets=config.feature_sets[:1],
        live_sets=(),
        queue=msgspec.structs.replace(config.queue, batch_bytes=max(config.queue.batch_bytes, 4 * 2**20)),
        join=msgspec.structs.replace(config.join, quick_lane=False, block_steps=8192),
        bank=msgspec.structs.replace(config.bank, block_rows=512, block_s=60.0, detector="none"),
    )


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """The configuration, or a ConfigError that names the key at fault."""
    tree = _read_yaml(path) if path is not None else {}
    origin: dict[str, str] = {}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and variable != ENV_FILE:
            _override(tree, variable, environ[variable], origin)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        key, problem = _explain(str(error))
        raise ConfigError(origin.get(key, key), problem) from None


def to_yaml(config: Config) -> str:
    """The effective configuration, as a file that gives it again."""
    text: str = yaml.safe_dump(msgspec.to_builtins(config, builtin_types=()), sort_keys=False)
    return text


def json_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file."""
    return msgspec.json.schema(Config)


class _UniqueKeys(yaml.SafeLoader):
    """YAML says that a key given twice is an error; PyYAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key_node.start_mark)
            if key_node.value in seen:
                problem = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(str(path), f"cannot be read: {reason}") from None
    tree = _parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(str(path), f"expected a mapping of sections, got {type(tree).__name__}")
    return tree


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 -- a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(origin, f"{error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        # the last three come from a tag that lies about its value: !!bool 2, !!int '', !!map [1], !!timestamp x
        raise ConfigError(origin, f"not YAML: {type(error).__name__}") from None


def _override(tree: dict[str, Any], variable: str, text: str, origin: dict[str, str]) -> None:
    path = variable.removeprefix(ENV_PREFIX).lower().split("__")
    level = tree
    for depth, name in enumerate(path[:-1]):
        below = level.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(variable, f"{'.'.join(path[: depth + 1])} is a value, not a section")
        level = below
    level[path[-1]] = _parse_yaml(text, variable)
    origin[".".join(path)] = variable


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_AT = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)


def _explain(text: str) -> tuple[str, str]:
    """The dotted key and the problem out of msgspec's sentence (``Expected `int` >= 1 - at `$.queue.wait_s```)."""
    match = _AT.match(text)
    if match is None:
        return "(top level)", text
    problem, path = match["problem"], (match["path"] or "").lstrip(".")
    if match["key"]:
        problem = "keys are words"
    unknown = _UNKNOWN.match(problem)
    if unknown:
        return ".".join(part for part in (path, unknown["field"]) if part), "unknown key"
    if "matching regex" in problem:
        problem = "expected host:port, the port 0 to 65535"
    return path or "(top level)", problem[:1].lower() + problem[1:].replace("`", "")
