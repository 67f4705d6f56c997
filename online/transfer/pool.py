"""The pool of donors: what other configurations learned, and the priors it makes for a new one, near and far.

Near: of the donors with the same model, the one that shares most other facts; its own coefficients make the prior.

Far: donors of any model, where none has the same. For a feature set that is one of the systems, they pool in the
system's full coefficients (:mod:`online.transfer`). ``portable`` has none that carry over: a token costs another model
something else. There the prior is the one of ``physics``, projected:

    minimise over beta >= 0   sum over typical steps i of ((x_i beta - yhat_i) / yhat_i)^2      yhat_i by physics

with sd 15 % of beta, 1 % of a typical step's worth, and the misfit of the projection as a share of beta. Reading the
weights explains most of what looks like fixed overhead; measured in docs/systems.md, Transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from online.features import Facts, FeatureSet, build
from online.features.sheets import Sheet, sheet_of
from online.features.systems import PHYSICS, PORTABLE, SYSTEMS, System
from online.rls import Prior, solve
from online.rows import PHASES, STEP_FEATURES, Floats, RowBlock, Target

from .population import FLOOR, SHARE, Donor, pool

_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (100.0, 500.0, 1000.0, 2000.0)
_PREFILLS = (0.0, 0.0, 0.0, 16.0, 256.0, 1024.0)


Priors = dict[tuple[str, str, tuple[str, ...]], Prior]
"""By target, feature set and its columns."""


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

    def same_model(self, facts: Facts) -> Priors:
        """Priors by the nearest donor of the same model; none without one."""
        donors = [d for d in self._donors if "model" in facts and d.facts.get("model") == facts["model"]]
        if not donors:
            return {}
        nearest = max(donors, key=lambda donor: sum(donor.facts.get(k) == v for k, v in facts.items()))
        return priors_of([donor for donor in donors if donor.config_id == nearest.config_id])

    def prior(self, name: str, target: Target, facts: Facts) -> Prior | None:
        """A prior for one set of a new configuration; None without donors that say anything of it."""
        if not self._donors:
            return None
        system = next((s for s in SYSTEMS if s.name == name), None)
        if system is not None:
            return self._pooled(system, target, facts)
        if name == PORTABLE.name and target is Target.STEP_TIME:
            physics = self._pooled(PHYSICS, target, facts)
            return None if physics is None else project(physics, facts)
        return None

    def _pooled(self, system: System, target: Target, facts: Facts) -> Prior | None:
        fitting = [d for d in self._donors if d.features.name == system.name and d.features.target is target]
        pooled = pool(system, target, fitting)
        return None if pooled is None else pooled.prior(facts)


def project(prior: Prior, facts: Facts) -> Prior | None:
    """A physics prior as one of ``portable``; None without the sheets that physics needs."""
    source, into = build("physics", Target.STEP_TIME, facts), build("portable", Target.STEP_TIME, facts)
    sheet, _ = sheet_of(facts)
    if source is None or into is None or sheet is None:
        return None
    rows = typical_steps(sheet)
    forecast = source.evaluate(rows) @ prior.mean[: len(source)]
    if not (forecast > 0.0).all():
        return None
    x = into.evaluate(rows) / forecast[:, None]
    p = len(into)
    beta = solve(x.T @ x, x.sum(axis=0), np.zeros(p, np.bool_), np.ones(p, np.bool_)).beta
    misfit = float(np.sqrt(np.mean((x @ beta - 1.0) ** 2)))
    worth = 1.0 / np.sqrt((x * x).mean(axis=0))
    sd = np.hypot(SHARE, misfit) * beta + FLOOR * worth
    return _with_source(Prior(beta, sd), prior, source)


def _with_source(projected: Prior, physics: Prior, source: FeatureSet) -> Prior:
    """At least as unsure as physics is of a whole step: the projection cannot know more."""
    relative = physics.sd[: len(source)] / np.maximum(physics.mean[: len(source)], 1e-12)
    weight = physics.mean[: len(source)] > 0.0
    unsure = (
        float(np.median(relative[weight & np.isfinite(relative)])) if (weight & np.isfinite(relative)).any() else 0.0
    )
    sd = np.maximum(projected.sd, unsure * projected.mean)
    k = len(PHASES)
    return Prior(
        np.concatenate([projected.mean, np.zeros(k)]), np.concatenate([sd, np.full(k, np.inf)]), physics.misfit
    )


def typical_steps(sheet: Sheet) -> RowBlock:
    """A grid of steps as servers run them: batches, contexts and prefills within the engine's bounds."""
    seats = sheet.max_seqs or _BATCHES[-1]
    budget = sheet.max_batched_tokens or _PREFILLS[-1]
    longest = sheet.max_model_len or _CONTEXTS[-1]
    lines: list[dict[str, float]] = [
        {
            "decode_requests": float(batch),
            "decode_tokens": float(batch),
            "decode_context_tokens": batch * context,
            "prefill_tokens": prefill,
            "prefill_requests": float(prefill > 0.0),
            "prefill_attention": prefill * prefill / 2.0,
            "requests": batch + float(prefill > 0.0),
        }
        for batch in _BATCHES
        for context in _CONTEXTS
        for prefill in _PREFILLS
        if batch <= seats and context <= longest and prefill + batch <= budget
    ]
    raw: Floats = np.array([[line.get(name, 0.0) for name in STEP_FEATURES] for line in lines])
    return RowBlock.of_lines(raw, np.ones(len(lines)))
