"""Every key of the configuration, with its type, bounds and meaning; units stand last in every name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .identity_config import ConfigurationsConfig
from .learning_config import BankConfig, DedupeConfig, JoinConfig
from .receiver_config import ReceiversConfig
from .section import HostPort, Section


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
    stuck_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="Refusing for so long without a break, the process says that it is not alive: a restart helps.",
        ),
    ] = 300.0


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
    wait_s: Annotated[
        float,
        Meta(ge=0, le=8, description="How long an export may wait for room before its sender is told to try again."),
    ] = 2.0
    batch_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=2**30,
            description="Bytes the worker takes in one turn: larger is cheaper and delays what is published.",
        ),
    ] = 2 * 2**20
    in_turn: Annotated[
        bool,
        Meta(
            description="A thread that is woken waits for the one that runs (Linux: `SCHED_BATCH`): less CPU, and"
            " acknowledgements some milliseconds later where a core is busy."
        ),
    ] = False


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

    directory: Annotated[str, Meta(description="Where snapshot, saved state and journal go; one process each.")] = (
        "snapshots"
    )
    interval_s: Annotated[
        float, Meta(ge=0.1, le=86_400, description="Pause between two writings of `snapshot.json`.")
    ] = 10.0
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
            description="Pause between two savings of `state.bin`: what a kill may lose without a journal.",
        ),
    ] = 60.0
    stalled_after_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="Spans without one learned row for so long are called a stall, with its reason.",
        ),
    ] = 600.0


class JournalConfig(Section, frozen=True, kw_only=True):
    """Where ``durability: journal`` keeps what was acknowledged, in the snapshot's directory."""

    capacity_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="Size of the journal; less where its volume has no room for it beside three states. "
            "When it is full, exports are refused until a state is saved.",
        ),
    ] = 256
    segment_mib: Annotated[int, Meta(ge=1, le=1024, description="Size of one of its files.")] = 8
    fsync: Annotated[
        bool, Meta(description="Survive the death of the node too, at the price of a disk flush per acknowledgement.")
    ] = False


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

    grace_s: Annotated[
        float, Meta(ge=0, le=300, description="How long calls that run may still end after SIGTERM.")
    ] = 3.0
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

    ``exit``: exit code 78 and one sentence. ``degrade``: the last good configuration, or the defaults, hold until it is
    mended. If the file is no YAML, ``TRACEFIT_CONFIG__ON_ERROR`` still says which.
    """

    on_error: Annotated[
        Literal["exit", "degrade"],
        Meta(description="`exit`: exit code 78, one sentence; `degrade`: the last good configuration or the defaults."),
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
        Literal["memory", "journal"],
        Meta(description="`memory`: what is acknowledged and not yet saved dies with the process; `journal`: nothing."),
    ] = "memory"
    state: StateConfig = StateConfig()
    journal: JournalConfig = JournalConfig()
    join: JoinConfig = JoinConfig()
    dedupe: DedupeConfig = DedupeConfig()
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
    reload_interval_s: Annotated[
        float, Meta(ge=0, le=86_400, description="How often the file is looked at for changes; 0: never.")
    ] = 10.0
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
