"""The pool of donors: what other configurations learned, and the priors that it gives a new one.

Two things say how the costs of a new configuration split. The step time of ``portable`` starts from its data sheet and
the overheads that donors share (:func:`shared_overheads`, online/transfer/sheet.py); a donor of the same identity adds
the evidence of its rows. Other feature sets start from coefficients pooled over donors (online/transfer/pooled.py), of
HFD-TL all but the residual's frozen there, of RECE by specialists, weighed by how alike their configurations are.

Without a sheet, and for other targets, the nearest donor of the same model, GPU and tensor parallelism gives its own
coefficients; one with a GPU gives nothing where none is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from online.blocks import median_of
from online.constants import MAD_TO_SD, SURE_SD
from online.features import Facts, build
from online.features.systems import HFD_TL, PORTABLE, RECE, SYSTEMS
from online.rls import Prior
from online.rows import Floats, Mask, Target

from .pooled import Donor, ensemble, frozen, pool, specialists
from .sheet import HYPER_MEAN, HYPER_SD, SHARED, Evidence, Population, SheetPrior, SheetTerms, estimate, terms_of

Priors = dict[tuple[str, str, tuple[str, ...]], Prior]
"""By target, feature set and its columns."""

_BY_SHEET = (Target.STEP_TIME.value, PORTABLE.name)
_ALIKE = ("model", "gpu", "tensor_parallel_size")
# Guard: cost, and a start that is open. Guess: donors vary by 10 % at least.
_ROUNDS, _OPEN, _FLOOR = 20, 1e3, 0.1


def shared_overheads(donors: Sequence[tuple[SheetTerms, Evidence]]) -> Population:
    """Mean and sd of one more model's overheads, by empirical Bayes over the donors; the hyper-prior without any.

        theta_m, V_m = estimate by A_m, b_m and the prior (mu, tau)         from mu = mu0, tau = 1,000 s0
        mu_j    = precision mean of theta_mj, 1 / tau_j^2 each, and of the hyper-prior mu0_j, 1 / s0_j^2
        tau_j^2 = (sum_m ((theta_mj - mu_j)^2 + V_mj) + (s0_j / 2)^2) / (k_j + 1),   tau_j >= 10 % of mu_j
        s_j^2   = tau_j^2 + var mu_j

    Outliers (:func:`_outliers`), and donors that do not have an overhead, are left out of its sums.
    Reference: Efron and Morris, Data analysis using Stein's estimator (JASA 1975).
    """
    if not donors:
        return Population(HYPER_MEAN, HYPER_SD)
    mean, sd = HYPER_MEAN[:SHARED], HYPER_SD[:SHARED]
    has = np.array([terms.has[:SHARED] for terms, _ in donors])
    mu, tau = mean, _OPEN * sd
    for _ in range(_ROUNDS):
        prior = Population(np.append(mu, HYPER_MEAN[SHARED:]), np.append(tau, HYPER_SD[SHARED:]))
        found = [estimate(terms, evidence, prior) for terms, evidence in donors]
        theta = np.array([each.theta[:SHARED] for each in found])
        variance = np.array([each.covariance.diagonal()[:SHARED] for each in found])
        kept = has & ~_outliers(theta, has)
        weight = np.where(kept, tau**-2.0, 0.0)
        mu = ((weight * theta).sum(axis=0) + mean / sd**2) / (weight.sum(axis=0) + sd**-2.0)
        squares = np.where(kept, (theta - mu) ** 2 + variance, 0.0).sum(axis=0) + (sd / 2.0) ** 2
        tau = np.maximum(np.sqrt(squares / (kept.sum(axis=0) + 1)), _FLOOR * mu)
    spread = np.sqrt(tau**2 + 1.0 / (kept.sum(axis=0) / tau**2 + sd**-2.0))
    return Population(np.append(mu, HYPER_MEAN[SHARED:]), np.append(spread, HYPER_SD[SHARED:]))


def _outliers(theta: Floats, has: Mask) -> Mask:
    """Mask of values, (m, 5), beyond 3 robust sd of the median, at least max(10 % of it, s0 / 4).

    The hyper-prior counts as two donors: one that is nothing like its sheet does not outvote it, three alike do.
    """
    outliers = np.zeros(has.shape, np.bool_)
    for j in range(SHARED):
        values = np.append(theta[has[:, j], j], [HYPER_MEAN[j]] * 2)
        center = median_of(values)
        spread = max(MAD_TO_SD * median_of(np.abs(values - center)), _FLOOR * center, HYPER_SD[j] / 4.0)
        outliers[:, j] = has[:, j] & (np.abs(theta[:, j] - center) > SURE_SD * spread)
    return outliers


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
        own = (d.evidence for d in self._donors if d.config_id == config_id)
        known = next((each for each in own if each is not None and terms.fits(each)), None)
        return SheetPrior(terms, self._population("" if known is None else config_id), known)

    def _population(self, without: str) -> Population:
        if without not in self._populations:
            told = [(terms_of(d.facts), d.evidence) for d in self._donors if d.config_id != without]
            self._populations[without] = shared_overheads(
                [
                    (terms, evidence)
                    for terms, evidence in told
                    if terms is not None and evidence is not None and terms.fits(evidence)
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
        if terms_of(facts) is not None:  # no donor's coefficients are put before the data sheet
            priors = {key: prior for key, prior in priors.items() if key[:2] != _BY_SHEET}
        return priors

    def prior(self, name: str, target: Target, facts: Facts) -> Prior | None:
        """A prior for one set of a new configuration; None without donors that say anything of it."""
        system = next((s for s in SYSTEMS if s.name == name), None)
        if not self._donors or system is None or system is PORTABLE:
            return None
        donors = [d for d in self._donors if d.features.name == name and d.features.target is target]
        if system is RECE:
            return ensemble(facts, specialists(system, target, donors))
        pooled, features = pool(system, target, donors), build(name, target, facts)
        prior = None if pooled is None else pooled.prior(facts)
        if prior is not None and features is not None and system is HFD_TL:
            return frozen(prior, features)
        return prior
