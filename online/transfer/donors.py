"""What other configurations learned, and the priors that it gives a new one.

``portable``'s step time starts from the data sheet of the new configuration and from overheads that donors share; a
donor of the same identity adds the evidence of its rows (online/transfer/sheet.py). Other sets start from coefficients
pooled over donors. Without a sheet, and for other targets, the nearest donor of the same model, GPU and tensor
parallelism gives its own coefficients; one with a GPU gives nothing where none is known.

**Pooled coefficients.** A donor d is the statistics (A_d, b_d) of one live set. With gamma (q,) the coefficients of all
columns of its system, those that are constant within a configuration included, its live coefficients are linear in
them, beta_d = M_d gamma: itself for a live column, and the value of a constant one for the intercept. So donors pool
exactly, without a row:

    gamma = argmin over gamma >= 0  sum_d (M_d gamma)' A_d (M_d gamma) - 2 b_d' M_d gamma
    beta0 = M_c gamma      tau_j = max(spread_j, 0.15 beta0_j) + 0.01 y / x_rms_j          of a new configuration c

spread_j: root mean square of the donors' own coefficients about M_d gamma: that the pool has no use for a column is no
knowledge that it costs nothing. y / x_rms is a whole step's worth of the column, the median over donors that have it;
nothing is known of a column that none has. Rows weigh 1 / y^2, so a slow configuration counts as much as a fast one.
Reference: Raina et al., Constructing informative priors using transfer learning (ICML 2006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from online.constants import DONOR_SHARE, LACK_OF_FIT
from online.features import INTERCEPT, PORTABLE, SYSTEMS, Facts, FeatureSet, System
from online.rls import Prior, RlsLearner, solve
from online.rows import Floats, Target

from .sheet import (
    HIDES_HITS,
    SheetPrior,
    SufficientStatistics,
    shared_overheads,
    statistics_of,
    terms_of,
)

# Guess: half of the floor of one donor (online/rls/solve.py).
_FLOOR = LACK_OF_FIT / 2.0

Priors = dict[tuple[str, str, tuple[str, ...]], Prior]
"""By target, feature set and its columns."""

_BY_SHEET = (Target.STEP_TIME.value, PORTABLE)
_ALIKE = ("model", "gpu", "tensor_parallel_size")
# Guard: memory and cost.
_CONFIGS_MAX = 64


@dataclass(frozen=True, slots=True)
class Donor:
    """What one configuration learned of one target with one live set: a (p, p), b (p,), without phases, of ``rows``.

    ``statistics``: by operating point, of ``portable``.
    """

    config_id: str
    facts: Facts
    features: FeatureSet
    a: Floats
    b: Floats
    beta: Floats
    rows: float
    statistics: SufficientStatistics | None = None


def donor_of(config_id: str, facts: Facts, learner: RlsLearner) -> Donor | None:
    """A learner's statistics as a donor, rows that it holds among them; None before it has any."""
    learner.fit_burn_in(last=True)
    a, b = learner.normal_equations()
    if not learner.started or not a.any():
        return None
    features, beta = learner.features, learner.beta[: len(b)]
    statistics = statistics_of(learner, hidden=facts.get(HIDES_HITS) is True)
    return Donor(config_id, dict(facts), features, a, b, beta, float(learner.strata.n1.sum()), statistics)


def matrix(system: System, target: Target, facts: Facts, names: Sequence[str]) -> tuple[tuple[str, ...], Floats] | None:
    """Names of the live columns (p) and M (p, q) over these of all columns; None where the system does not apply."""
    table = system.table(target, facts) or ()
    live = tuple(column.name for column in table if column.constant is None)
    m = np.zeros((len(live), len(names)))
    for column in table:
        if column.name in names:
            row = live.index(INTERCEPT if column.constant is not None else column.name)
            m[row, names.index(column.name)] = 1.0 if column.constant is None else column.constant
    return (live, m) if table else None


@dataclass(frozen=True, slots=True)
class Pooled:
    """Donors of one system and target together: gamma (q,) by the names of all columns."""

    system: System
    target: Target
    names: tuple[str, ...]
    gamma: Floats
    donors: tuple[tuple[Donor, Floats], ...]
    """Each with its M."""

    def prior(self, facts: Facts) -> Prior | None:
        """Prior of a configuration's live set; None where the system does not apply or nothing carries over."""
        mapping = matrix(self.system, self.target, facts, self.names)
        if mapping is None or not self.gamma.any():
            return None
        live, m = mapping
        mean, (spread, step_us) = m @ self.gamma, np.array([self._of_donors(name) for name in live]).T
        # It gives way to rows as if each were uncertain by 8 %: the first ones are all of one kind.
        return Prior(mean, np.maximum(spread, DONOR_SHARE * mean) + _FLOOR * step_us, lack_of_fit=0.08)

    def _of_donors(self, name: str) -> tuple[float, float]:
        """How far the donors' own coefficients of a live column lie from the pooled one, and y / x_rms."""
        squares, steps_us = [0.0], list[float]()
        for donor, m in self.donors:
            j = donor.features.names.index(name) if name in donor.features.names else None
            if j is not None and donor.a[j, j] > 0.0:
                squares.append(float(donor.beta[j] - m[j] @ self.gamma) ** 2)
                steps_us.append(np.sqrt(max(donor.rows, 1.0) / donor.a[j, j]))  # A sums x^2 / y^2
        return np.sqrt(sum(squares) / max(len(steps_us), 1)), float(np.median(steps_us)) if steps_us else np.inf


def pool(system: System, target: Target, donors: Sequence[Donor]) -> Pooled | None:
    """All donors to which the system applies, pooled, by the solution of their summed statistics; None without any."""
    tables = [system.table(target, donor.facts) or () for donor in donors]
    names = tuple(dict.fromkeys(column.name for table in tables for column in table))
    mapped = [(donor, matrix(system, target, donor.facts, names)) for donor in donors]
    used = tuple((donor, m[1]) for donor, m in mapped if m is not None and m[0] == donor.features.names)
    if not used:
        return None
    a = np.sum([m.T @ donor.a @ m for donor, m in used], axis=0)
    b = np.sum([m.T @ donor.b for donor, m in used], axis=0)
    return Pooled(system, target, names, solve(a, b).beta, used)


def priors_of(donors: Sequence[Donor]) -> Priors:
    """Priors from donors' own coefficients, for a configuration with the same columns; the first donor counts."""
    priors: Priors = {}
    for donor in donors:
        features, per_row = donor.features, donor.a.diagonal() / max(donor.rows, 1.0)
        priors.setdefault((features.target.value, features.name, features.names), Prior.of_donor(donor.beta, per_row))
    return priors


class DonorPool:
    """Donors by feature set and target, of the newest 64 configurations."""

    def __init__(self) -> None:
        self._donors: list[Donor] = []
        self._populations: dict[str, Prior] = {}

    def add(self, donors: Sequence[Donor]) -> None:
        """Add donors; beyond the bound the oldest configurations are dropped."""
        self._donors += donors
        kept = [*dict.fromkeys(donor.config_id for donor in self._donors)][-_CONFIGS_MAX:]
        self._donors = [donor for donor in self._donors if donor.config_id in kept]
        self._populations.clear()

    def sheet_prior(self, config_id: str, facts: Facts) -> SheetPrior | None:
        """What is known of the step time of a configuration before its first row; None without its sheet."""
        terms = terms_of(facts)
        if terms is None:
            return None
        own = (d.statistics for d in self._donors if d.config_id == config_id)
        known = next((each for each in own if each is not None and terms.fits(each)), None)
        return SheetPrior(terms, self._population("" if known is None else config_id), known)

    def _population(self, without: str) -> Prior:
        if without not in self._populations:
            told = [(terms_of(d.facts), d.statistics) for d in self._donors if d.config_id != without]
            self._populations[without] = shared_overheads(
                [(terms, own) for terms, own in told if terms is not None and own is not None and terms.fits(own)]
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
        if terms_of(facts) is not None:  # no donor's coefficients are put before the data sheet
            priors = {key: prior for key, prior in priors.items() if key[:2] != _BY_SHEET}
        return priors

    def prior(self, name: str, target: Target, facts: Facts) -> Prior | None:
        """A prior for one set of a new configuration; None without donors that say anything of it."""
        system = SYSTEMS.get(name)
        donors = [d for d in self._donors if d.features.name == name and d.features.target is target]
        pooled = None if system is None else pool(system, target, donors)
        return None if pooled is None else pooled.prior(facts)
