"""The pool of donors: what other configurations learned, and what it says of a new one.

The step time of ``portable`` is told by the new one's data sheet and the overheads that donors share
(online/transfer/sheet_estimate.py); without donors by the sheet and what is known of such overheads in general. A donor
with the same identity adds what it has seen. One whose speed changed at constant work is not lent.

Other feature sets start where their sources say: with coefficients pooled over donors (:mod:`online.transfer`), of
HFD-TL all but the residual's frozen there, of RECE by specialists, weighed by how alike their configurations are.
Without a sheet, and for other targets, the nearest donor of the same model, GPU and tensor parallelism gives its own;
one with a GPU gives nothing where none is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from online.features import Facts, build
from online.features.systems import HFD_TL, PORTABLE, RECE, SYSTEMS, System
from online.rls import Prior
from online.rows import Target

from .capped_evidence import Evidence
from .configuration_space import ensemble, specialists
from .population import Donor, frozen, pool
from .shared_overheads import Voter, shared_overheads
from .sheet_estimate import SheetPrior
from .sheet_terms import Population, terms_of

Priors = dict[tuple[str, str, tuple[str, ...]], Prior]
"""By target, feature set and its columns."""

_BY_SHEET = (Target.STEP_TIME.value, PORTABLE.name)
"""What is told by the data sheet where there is one: no donor's coefficients are put before that."""
_ALIKE = ("model", "gpu", "tensor_parallel_size")


def priors_of(donors: Sequence[Donor]) -> Priors:
    """What these donors' own coefficients are worth to a configuration with the same columns; the first one counts."""
    priors: Priors = {}
    for donor in donors:
        if donor.prior is not None:
            priors.setdefault((donor.features.target.value, donor.features.name, donor.features.names), donor.prior)
    return priors


class DonorPool:
    """Donors by feature set and target, of the newest ``configs_max`` configurations."""

    def __init__(self, configs_max: int = 64) -> None:
        self.configs_max = configs_max
        self._donors: list[Donor] = []
        self._populations: dict[str, Population] = {}

    def __len__(self) -> int:
        """Configurations in the pool."""
        return len({donor.config_id for donor in self._donors})

    def __iter__(self) -> Iterator[Donor]:
        return iter(self._donors)

    def add(self, donors: Sequence[Donor]) -> None:
        """Take what configurations know; the oldest go beyond the bound."""
        self._donors += donors
        order = list(dict.fromkeys(donor.config_id for donor in self._donors))
        kept = set(order[-self.configs_max :])
        self._donors = [donor for donor in self._donors if donor.config_id in kept]
        self._populations.clear()

    def sheet_prior(self, config_id: str, facts: Facts) -> SheetPrior | None:
        """What is known of the step time of a configuration before its first row; None without its sheet."""
        terms = terms_of(facts)
        if terms is None:
            return None
        known = next((evidence for donor, evidence in self._lent() if donor.config_id == config_id), None)
        if known is not None and terms.hides_hits:
            known = known.without_prefill()
        return SheetPrior(facts, terms, self._population("" if known is None else config_id), known)

    def _lent(self) -> list[tuple[Donor, Evidence]]:
        return [(d, d.evidence) for d in self._donors if d.evidence is not None]

    def _population(self, without: str) -> Population:
        if without not in self._populations:
            told = [(terms_of(d.facts), evidence) for d, evidence in self._lent() if d.config_id != without]
            self._populations[without] = shared_overheads(
                [
                    Voter(terms, evidence.without_prefill() if terms.hides_hits else evidence)
                    for terms, evidence in told
                    if terms is not None
                ]
            )
        return self._populations[without]

    def same_machine(self, facts: Facts) -> Priors:
        """Priors by the nearest donor of the same model on the same GPUs; none without one."""
        alike = [name for name in _ALIKE if name in facts or name == "gpu"]  # a GPU is no likeness of an unknown one
        donors = [d for d in self._donors if all(d.facts.get(name) == facts.get(name) for name in alike)]
        if "model" not in facts or not donors:
            return {}
        nearest = max(donors, key=lambda donor: sum(donor.facts.get(k) == v for k, v in facts.items()))
        priors = priors_of([donor for donor in donors if donor.config_id == nearest.config_id])
        if terms_of(facts) is not None:
            priors = {key: prior for key, prior in priors.items() if key[:2] != _BY_SHEET}
        return priors

    def prior(self, name: str, target: Target, facts: Facts) -> Prior | None:
        """A prior for one set of a new configuration; None without donors that say anything of it."""
        system = next((s for s in SYSTEMS if s.name == name), None)
        if not self._donors or system is None or name == PORTABLE.name:
            return None
        fitting = [d for d in self._donors if d.features.name == name and d.features.target is target]
        if name == RECE.name:
            return ensemble(facts, specialists(system, target, fitting))
        return _pooled(system, target, facts, fitting)


def _pooled(system: System, target: Target, facts: Facts, donors: Sequence[Donor]) -> Prior | None:
    pooled, features = pool(system, target, donors), build(system.name, target, facts)
    prior = None if pooled is None else pooled.prior(facts)
    if prior is not None and features is not None and system.name == HFD_TL.name:
        return frozen(prior, features)
    return prior
