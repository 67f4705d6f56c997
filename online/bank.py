"""The bank: configurations x targets x models; rows in, snapshots out.

    learn(config, target, rows)  -> Counter of RowOutcome, whose values sum to the rows received
    targets(config)              -> what is published now: reading changes nothing
    state() / restore(bytes)     -> stop and restart is no restart
    merge(other)                 -> statistics added, stratum by stratum

Rows come in event-time order. They are evaluated when they come and learned in blocks that the rows themselves cut
(online/blocks.py). Names of models: a feature set's name for the default learner ``rls``, ``<learner>/<set>`` for the
others. Configurations are bounded by ``configs_max``, donors by :mod:`online.transfer`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from online.constants import ENGINES_MAX
from online.features import PORTABLE, Fact, Facts
from online.target import BankSettings, HistoryView, TargetState, check_settings, feature_set
from online.transfer import Donor, DonorPool, Priors, SheetPrior, donor_of, priors_of

from .rows import RowBlock, RowOutcome, Target
from .snapshot import TargetSnapshot
from .state import LEARNERS, STATE_BYTES_MAX, Lineage, StateError, Tree, decode, encode, part_of_tree, refusing

IDLE_NS = 3_600 * 10**9


@dataclass(slots=True)
class Configuration:
    """All that the bank holds of one configuration, which may have learners, or facts alone.

    ``priors``: coefficients that its models may start from. ``last_seen_ns``: event time of its newest row, refused
    rows included; after a restore, that of the newest learned row.
    """

    targets: dict[Target, TargetState] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)
    priors: Priors = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    last_seen_ns: int = 0

    @property
    def learned(self) -> bool:
        """Whether it has learners, and so counts against ``configs_max``."""
        return bool(self.targets)

    def add(self, other: Configuration) -> None:
        """Merge another configuration into this one; the other must not be used afterwards."""
        self.facts = other.facts | self.facts
        engines = self.lineage.main_engine(), other.lineage.main_engine()
        for target, state in other.targets.items():
            if self.targets.setdefault(target, state) is not state:
                self.targets[target].add(state, engines)
        self.lineage.add(other.lineage)
        self.last_seen_ns = max(self.last_seen_ns, other.last_seen_ns)

    def drop_outgrown(self, facts: Facts) -> None:
        """Drop targets whose columns no longer fit the facts, for example because the experts became known."""
        for state in [*self.targets.values()]:
            made = (feature_set(name, state.target, facts, state.settings) for name in state.models)
            if any(each is not None and each.names != state.models[each.name].features.names for each in made):
                del self.targets[state.target]

    def start_from(self, priors: Priors) -> None:
        """Its models may start from these coefficients."""
        self.priors = priors
        for target, state in self.targets.items():
            for learner in state.models.values():
                if (prior := priors.get((target.value, learner.features.name, learner.features.names))) is not None:
                    learner.take_prior(prior)


class Bank:
    """All that is learned. One thread learns; readers get immutable snapshots.

    At most ``configs_max`` configurations are learned. A new one takes a free place. Where there is none, it evicts the
    configuration that has been silent longest, if that is an hour of event time or more. Else its rows are refused.

    Args:
        settings: checked here; ValueError names the key.

    Attributes:
        learned_rows: rows learned since the bank was made or restored; a new generation is worth making when it moves.
        refused: configurations that found no place lately, with the event time of their newest row, oldest first.
    """

    def __init__(self, settings: BankSettings) -> None:
        check_settings(settings)
        self.settings = settings
        self.learned_rows = 0
        self.refused: OrderedDict[str, int] = OrderedDict()
        self._known: dict[str, Configuration] = {}
        self.pool = DonorPool()

    # ---------------------------------------------------------------- rows in

    def learn(
        self,
        config_id: str,
        target: Target,
        rows: RowBlock,
        engines: Mapping[int, str] | None = None,
    ) -> Counter[RowOutcome]:
        """Learn rows of one target; what became of them.

        ``engines``: names of the engines that the rows have as numbers; rows of others have no lineage.
        """
        if not len(rows):
            return Counter()
        if not self._make_place(config_id, int(rows.end_ns.max())):
            return Counter({RowOutcome.LIMIT_EXCEEDED: len(rows)})
        state = self._target(config_id, target)
        outcome = state.learn(rows)
        self.learned_rows += outcome[RowOutcome.LEARNED]
        if engines:
            state.name_engines(engines)
            if outcome[RowOutcome.LEARNED]:
                for number in sorted(engines.keys() & set(rows.engine.tolist())):
                    self._known[config_id].lineage.record(engines[number], rows.end_ns[rows.engine == number])
        return outcome

    def _make_place(self, config_id: str, unix_ns: int) -> bool:
        """Evict an idle configuration if this one needs its place; whether it has one now."""
        long_ago_ns = unix_ns - IDLE_NS
        if not self._get(config_id).learned and len(taken := self.configs()) >= self.settings.configs_max:
            silent = [each for each in taken if self._known[each].last_seen_ns < long_ago_ns]
            if not silent:
                self.refused[config_id] = max(unix_ns, self.refused.pop(config_id, 0))
                while len(self.refused) > ENGINES_MAX or next(iter(self.refused.values())) < long_ago_ns:
                    self.refused.popitem(last=False)
                return False
            self.drop(min(silent, key=lambda each: self._known[each].last_seen_ns))
        self.refused.pop(config_id, None)
        known = self._known.setdefault(config_id, Configuration())
        known.last_seen_ns = max(known.last_seen_ns, unix_ns)
        return True

    def _get(self, config_id: str) -> Configuration:
        """The configuration of this id; an empty one, which is not stored, if the id is unknown."""
        return self._known.get(config_id) or Configuration()

    def _target(self, config_id: str, target: Target) -> TargetState:
        known = self._known[config_id]
        if target not in known.targets:
            known.targets[target] = TargetState(target, self.settings)
            self._add_features(config_id, known.targets[target])
        return known.targets[target]

    def _add_features(self, config_id: str, state: TargetState) -> None:
        known = self._known[config_id]
        if state.target is Target.STEP_TIME:
            state.sheet_prior = self._sheet_prior(config_id)
        for name in self.settings.feature_sets:
            features = feature_set(name, state.target, known.facts, self.settings)
            if features is not None:
                told = known.priors.get((state.target.value, name, features.names))
                state.add_features(features, told or self.pool.prior(name, state.target, known.facts))

    # ---------------------------------------------------------------- configurations

    def describe(self, config_id: str, facts: Facts) -> None:
        """Facts of a configuration (model, gpu, ...): feature sets and donors that need them start when they can."""
        known = self._known.setdefault(config_id, Configuration())
        known.facts.update(facts)
        # Facts of configurations that never sent a row are kept for as many as there may be configurations.
        idle = [each for each, other in self._known.items() if not other.learned]
        for each in idle[: max(0, len(idle) - self.settings.configs_max)]:
            del self._known[each]
        if not known.priors and (priors := self.pool.same_machine(known.facts)):
            known.start_from(priors)
        known.drop_outgrown(known.facts)
        for state in known.targets.values():
            self._add_features(config_id, state)

    def rename(self, old: str, new: str) -> None:
        """Move a configuration's state to a new id, or merge it there: its identity has become better known."""
        if old == new or not self._get(old).learned:
            return
        known, mine = self._known.pop(old), self._known.setdefault(new, Configuration())
        mine.facts, mine.priors = known.facts | mine.facts, mine.priors or known.priors
        for each in (mine, known):
            each.drop_outgrown(mine.facts)
        mine.add(known)

    def warm_start(self, config_id: str, donor_id: str) -> None:
        """A configuration changed: start the new one's models with the old one's coefficients as the prior."""
        donor = self._get(donor_id)
        if donor.learned and donor_id != config_id:
            self._known.setdefault(config_id, Configuration()).start_from(priors_of(self.statistics(donor_id)))

    def add_donors(self, data: bytes) -> None:
        """Learn what other configurations may start from out of a state file."""
        donors = Bank(self.settings)
        donors.restore(data)
        for config_id in donors.configs():
            self.pool.add(donors.statistics(config_id))

    def statistics(self, config_id: str) -> list[Donor]:
        """A configuration's statistics per target and feature set, as donors for others."""
        known = self._known[config_id]
        learners = [each for state in known.targets.values() for each in copy.deepcopy(state).models.values()]
        return [donor for each in learners if (donor := donor_of(config_id, known.facts, each)) is not None]

    def facts(self, config_id: str) -> Facts:
        """What is known of a configuration."""
        return dict(self._get(config_id).facts)

    @property
    def lineages(self) -> dict[str, Lineage]:
        """By configuration, the engines it has learned from."""
        return {each: known.lineage for each, known in self._known.items() if known.lineage.engines}

    def drop(self, config_id: str) -> None:
        """Forget a configuration with all its learners."""
        self._known.pop(config_id, None)

    def configs(self) -> list[str]:
        """Configurations that have learned."""
        return [config_id for config_id, known in self._known.items() if known.learned]

    def targets(self, config_id: str) -> dict[str, TargetSnapshot]:
        """Snapshots of a configuration's targets, partial blocks included; reading changes nothing."""
        by_sheet = self.prior_prediction(config_id)
        snapshots = {} if by_sheet is None else {Target.STEP_TIME.value: by_sheet}
        for target, state in self._get(config_id).targets.items():
            if (snapshot := state.flushed().snapshot()) is not None:
                snapshots[target.value] = snapshot
        return dict(sorted(snapshots.items()))

    def prior_prediction(self, config_id: str) -> TargetSnapshot | None:
        """The step time of a configuration that has no row of it yet, by its sheet; None without one."""
        if Target.STEP_TIME in self._get(config_id).targets:
            return None
        prior = self._sheet_prior(config_id)
        return None if prior is None else prior.target_before()

    def _sheet_prior(self, config_id: str) -> SheetPrior | None:
        is_learned = PORTABLE in self.settings.feature_sets
        return self.pool.sheet_prior(config_id, self._get(config_id).facts) if is_learned else None

    def history(self, config_id: str) -> HistoryView | None:
        """The latest rows of a configuration's steps, and its coefficients over the day, without the partial block."""
        step = self._get(config_id).targets.get(Target.STEP_TIME)
        return None if step is None or step.history is None else step.history.view()

    # ---------------------------------------------------------------- state

    def to_state(self, config_id: str = "") -> Tree:
        """State tree of the bank, or of one configuration, that shares no memory with it. Partial blocks are kept."""
        configs = {
            each: {
                "targets": {target.value: state.to_state() for target, state in known.targets.items()},
                "facts": dict(known.facts),
                "lineage": known.lineage.to_state(),
            }
            for each, known in self._known.items()
            if known.learned and config_id in ("", each)
        }
        return {"learned_rows": 0 if config_id else self.learned_rows, "configs": configs}

    def from_state(self, state: Tree) -> None:
        """Continue from a state; models in it that are not configured are left out.

        Raises:
            StateError: the state does not fit; the bank is as it was before.
        """
        fresh = Bank(self.settings)
        with refusing():
            fresh.learned_rows = msgspec.convert(state["learned_rows"], Annotated[int, msgspec.Meta(ge=0)])
            for config_id, kept in [*state["configs"].items()][-self.settings.configs_max :]:
                known = fresh._known[config_id] = Configuration()
                known.facts = msgspec.convert(kept["facts"], dict[str, Fact])
                if not all(math.isfinite(fact) for fact in known.facts.values() if isinstance(fact, float)):
                    raise StateError("a fact is not finite")
                known.lineage.from_state(kept["lineage"])
                for target, own in kept["targets"].items():
                    one = fresh._target(config_id, Target(target))
                    one.from_state(own)
                    known.last_seen_ns = max(known.last_seen_ns, one.last_ns)
        self._known, self.learned_rows = fresh._known, fresh.learned_rows

    def state(self, config_id: str = "") -> bytes:
        """A state file of all that is learned, or of one configuration."""
        return encode({LEARNERS: self.to_state(config_id)})

    def restore(self, data: bytes, bytes_max: int = STATE_BYTES_MAX) -> None:
        """Continue from a state file, a sidecar's or one of the learners alone; see `decode`, :meth:`from_state`."""
        self.from_state(part_of_tree(decode(data, bytes_max), LEARNERS))

    def event_span_ns(self) -> tuple[int, int]:
        """Event time of the first and of the last row that any target has learned; 0 without any."""
        states = [state for known in self._known.values() for state in known.targets.values() if state.last_ns]
        return min((s.first_ns for s in states), default=0), max((s.last_ns for s in states), default=0)

    def merge(self, other: Bank) -> None:
        """Merge another bank, which is not used again, into this one. The caller ensures that they share no rows."""
        for config_id, known in other._known.items():
            if known.learned:
                self._known.setdefault(config_id, Configuration()).add(known)
        self.learned_rows += other.learned_rows
