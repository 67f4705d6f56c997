"""Every key of the configuration, with its type, bounds and meaning; units stand last in every name."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec

from .receiver_config import ReceiversConfig
from .section import Bound, HostPort, Section


class JoinConfig(Section, frozen=True, kw_only=True):
    """How long a row waits for the journeys that complete it, and what may be held meanwhile.

    Times are event time: what the telemetry says, never when it was processed.
    """

    window_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 180.0
    """A step whose requests have not all finished by then is used with what is known."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 20.0
    """How late a span may arrive after its end: 5 s batching, retries, reordering."""
    steps_max: Bound = 65_536
    """Steps held per engine process."""
    requests_max: Bound = 20_000
    """Finished requests and API spans waiting for their other half, per engine."""
    engines_max: Bound = 64
    """Engines held; one silent for ``window_s`` makes room, else a newcomer is refused."""
    page_engines_max: Bound = 1024
    """Engines known by their pages alone; the one not scraped for longest makes room."""
    row_steps_max: Bound = 512
    """Longest interval that still gives a row: long intervals sum their stalls."""
    warm_up_rows: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 64
    """Rows of a new engine process held until its one-time compilation can be told from its pace."""
    kv_batches_max: Bound = 65_536
    """Batches of KV events held per publisher process."""
    block_steps: Annotated[int, msgspec.Meta(ge=256, le=65_536)] = 512
    """Steps after which what they taught about their engine comes into force: larger is cheaper, and reacts later."""
    quick_lane: bool = True
    """Send rows down the quick lane too: live prediction and drift do not wait for journeys."""


class DedupeConfig(Section, frozen=True, kw_only=True):
    """How long and how many span ids are remembered (event time)."""

    window_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    ids_max: Bound = 100_000
    emitters_max: Bound = 256


Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""YAML knows .nan and .inf; of no knob are they a value."""


Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""YAML's integers have no end; those of a state file have."""


class RuleConfig(Section, frozen=True, kw_only=True):
    """What is true of engines that match: every pattern (``*``, ``?``) of ``match`` holds; an empty one matches all."""

    match: dict[str, str] = msgspec.field(default_factory=dict)
    facts: dict[str, str | Whole | Finite | bool] = msgspec.field(default_factory=dict)
    model_config: str | None = None


class DiscoveryEndpoint(Section, frozen=True, kw_only=True):
    """A vLLM server to ask about itself; ``instance`` says (by pattern) which engines it answers for."""

    url: Annotated[str, msgspec.Meta(pattern=r"^https?://[^\s/?#]+/?$", max_length=256)]
    instance: str = "*"


class DiscoveryConfig(Section, frozen=True, kw_only=True):
    """Which servers to ask, and how patiently."""

    endpoints: Annotated[tuple[DiscoveryEndpoint, ...], msgspec.Meta(max_length=16)] = ()
    interval_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 30.0
    refresh_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0


class ConfigurationsConfig(Section, frozen=True, kw_only=True):
    """Who the engines are, where they do not say it themselves."""

    rules: Annotated[tuple[RuleConfig, ...], msgspec.Meta(max_length=1000)] = ()
    model_config: str | None = None
    hardware_file: str | None = None
    discovery: DiscoveryConfig = DiscoveryConfig()


class MemoryConfig(Section, frozen=True, kw_only=True):
    """Exports are refused while the process uses more; 0 means 80 % of the cgroup's limit, if it has one."""

    limit_mib: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    stuck_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 300.0
    """Refusing for so long without a break, the process says that it is not alive: only a restart helps."""


class QueueConfig(Section, frozen=True, kw_only=True):
    """Between the receivers and the worker. Bytes count until they are learned from."""

    capacity_bytes: Annotated[int, msgspec.Meta(ge=65_536, le=2**34)] = 16 * 2**20
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=8)] = 2.0
    batch_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**30)] = 2 * 2**20


class HttpConfig(Section, frozen=True, kw_only=True):
    """The server of metrics, health, snapshot and status page."""

    endpoint: HostPort = "0.0.0.0:9464"  # read-only pages; Prometheus sits in another pod
    token_file: str = ""
    """With it, everything but metrics and health asks for a token of this file."""
    state: bool = False
    """Serve ``/state``, what the newest state file knows, for `tracefit fleet pull`."""


class ExportersConfig(Section, frozen=True, kw_only=True):
    """The ways in which what was learned leaves the process."""

    http: HttpConfig = HttpConfig()


class SnapshotConfig(Section, frozen=True, kw_only=True):
    """The published coefficients: how often a new generation, where and how often on disk."""

    directory: str = "snapshots"
    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 10.0
    publish_interval_s: Annotated[float, msgspec.Meta(ge=0.05, le=3_600)] = 5.0


class StateConfig(Section, frozen=True, kw_only=True):
    """``state.bin`` beside the snapshot: how often, and after how long learning nothing is called a stall."""

    interval_s: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 60.0
    stalled_after_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0


class JournalConfig(Section, frozen=True, kw_only=True):
    """Where ``durability: journal`` keeps what was acknowledged, in the snapshot's directory."""

    capacity_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    segment_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    fsync: bool = False
    """Survive the death of the node too, at the price of a disk flush per acknowledgement."""


class BankConfig(Section, frozen=True, kw_only=True):
    """Bounds of the learners."""

    block_rows: Bound = 2048
    block_s: Annotated[float, msgspec.Meta(ge=0.001, le=3_600)] = 4.0
    detector: str = "cusum"
    river_rows_per_s: Annotated[float, msgspec.Meta(ge=1, le=1_000_000)] = 32.0
    """Rows per second of event time that each River model sees of a target: what bounds their cost."""
    configs_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 64


ItlTarget = Annotated[float, msgspec.Meta(gt=0, le=60_000)]


class SloConfig(Section, frozen=True, kw_only=True):
    """Targets that the advisory metrics are given for; they change nothing that is learned."""

    itl_ms: Annotated[tuple[ItlTarget, ...], msgspec.Meta(max_length=3)] = ()
    """Mean time between tokens: `tracefit_slo_concurrency` says how many requests fit each."""


class ShutdownConfig(Section, frozen=True, kw_only=True):
    """Budget of a graceful stop; it has to fit the pod's terminationGracePeriodSeconds."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 3.0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 5.0


class StartConfig(Section, frozen=True, kw_only=True):
    """What becomes of a start whose configuration is wrong.

    ``exit``: exit code 78 and one sentence. ``degrade``: the last good configuration, or the defaults, hold until it is
    mended. If the file is no YAML, ``TRACEFIT_CONFIG__ON_ERROR`` still says which.
    """

    on_error: Literal["exit", "degrade"] = "exit"


class Config(Section, frozen=True, kw_only=True):
    """Everything that can be configured."""

    config: StartConfig = StartConfig()
    receivers: ReceiversConfig = ReceiversConfig()
    queue: QueueConfig = QueueConfig()
    memory: MemoryConfig = MemoryConfig()
    exporters: ExportersConfig = ExportersConfig()
    snapshot: SnapshotConfig = SnapshotConfig()
    durability: Literal["memory", "journal"] = "memory"
    """``memory``: what is acknowledged and not in a saved state dies with the process. ``journal``: it does not."""
    state: StateConfig = StateConfig()
    journal: JournalConfig = JournalConfig()
    join: JoinConfig = JoinConfig()
    dedupe: DedupeConfig = DedupeConfig()
    bank: BankConfig = BankConfig()
    slo: SloConfig = SloConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    configurations: ConfigurationsConfig = ConfigurationsConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reload_interval_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 10.0
    """How often the file is looked at for changes; 0: never."""
    donors: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    learners: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)] = ("rls", "river:residual")
    feature_sets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=32)] = ("portable", "physics")
    custom: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
