"""What merged states know, as snapshots: by configuration, and for all that run one model on one GPU.

Deterministic: the time of a snapshot is that of the newest row, so that the same states give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from collector import __version__
from collector.config import Config
from collector.identity import IDENTITY, Fact, config_id, is_mixture_of_experts
from collector.runtime import PrintLine
from online import Bank, ConfigSnapshot, Snapshot, StateError, TargetSnapshot, part_of
from online.transfer import HIDES_HITS

FactsByEngine = Mapping[tuple[str, str], Mapping[str, Fact]]
"""By configuration and engine, what its sidecar knows of it."""

_TELEMETRY = "merged"
"""A state does not say what its rows were made from."""
_STEP_TIME = "step_time"
_MACHINE = ("gpu", "tensor_parallel_size", "dtype", "quantization", "cpu_offload")
"""Of the facts of identity, those that make one machine faster than another; whoever does not say them may hide two."""
_GROUP = ("model", "gpu")
_KIND_MIN, _KIND_SHARE = 3, 0.1
"""Fewer engines of another speed are engines that are slow, not another kind of machine."""


def fleet_snapshot(bank: Bank, generation: int = 1, engines: FactsByEngine | None = None) -> Snapshot:
    """Every configuration of a bank of merged states."""
    configs = []
    for each in sorted(bank.configs()):
        targets = bank.targets(each)
        facts = dict(bank.facts(each))
        apart = _told_apart_by(each, facts, targets, engines or {})
        configs.append(
            ConfigSnapshot(
                config_id=each,
                config=facts,
                engines=[],
                telemetry=_TELEMETRY,
                targets=targets,
                told_apart_by=apart,
                prefix_hits_hidden=facts.get(HIDES_HITS) is True,
                mixture_of_experts=is_mixture_of_experts(facts),
            )
        )
    newest_unix_nano = bank.event_span_ns()[1]
    return Snapshot(
        generation=generation, created_unix_nano=newest_unix_nano, tracefit_version=__version__, configs=configs
    )


def by_model_and_gpu(bank: Bank, config: Config, note: PrintLine) -> Bank:
    """All configurations of one model on one GPU as one; each keeps only the facts that all of it share."""
    groups: dict[str, list[str]] = {}
    for each in sorted(bank.configs()):
        identity = {name: fact for name, fact in bank.facts(each).items() if name in _GROUP}
        if "model" in identity:
            groups.setdefault(config_id(identity), []).append(each)
    pooled = Bank(config)
    for group, members in sorted(groups.items()):
        whole = Bank(config)
        try:
            for member in members:
                part = alone(bank, member)
                part.rename(member, group)
                whole.merge(part)
        except StateError as error:
            note(f"warning: {', '.join(members)} are not pooled: {error}")
            continue
        shared = _shared([bank.facts(member) for member in members])
        whole.forget_facts(group, keep=shared.keys())
        pooled.merge(whole)
    return pooled


def alone(bank: Bank, each: str) -> Bank:
    """A copy that knows one configuration only, with the engines it has learned from."""
    part = part_of(bank, each)
    part.lineages = {name: lineage for name, lineage in bank.lineages.items() if name == each}
    return part


def _shared(every: list[Mapping[str, Fact]]) -> dict[str, Fact]:
    return {name: fact for name, fact in every[0].items() if all(facts.get(name) == fact for facts in every)}


def _told_apart_by(
    each: str, facts: Mapping[str, Fact], targets: Mapping[str, TargetSnapshot], engines: FactsByEngine
) -> list[str]:
    """Facts beside the identity that engines of another speed have other values of than the rest.

    Where no fact is different just so, those of the machine that nobody says.
    """
    replicas = targets[_STEP_TIME].replicas if _STEP_TIME in targets else []
    slow, fast = (
        [r for r in replicas if r.differs and r.ratio and (r.ratio > 1.0) is above] for above in (True, False)
    )
    apart = {replica.engine for replica in slow or fast}
    if len(apart) < max(_KIND_MIN, _KIND_SHARE * len(replicas)):
        return []
    kinds = [
        [engines.get((each, replica.engine), {}) for replica in replicas if (replica.engine in apart) is inside]
        for inside in (True, False)
    ]
    names = {name for members in kinds for known in members for name in known} - set(IDENTITY)
    telling = [name for name in sorted(names) if _tells_apart(name, kinds)]
    return telling or [name for name in _MACHINE if name not in facts]


def _tells_apart(name: str, kinds: list[list[Mapping[str, Fact]]]) -> bool:
    values = [{str(known[name]) for known in members if name in known} for members in kinds]
    return all(values) and sum(map(len, values)) == len(set().union(*values))
