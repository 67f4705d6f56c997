"""What other configurations know: donors, pool, configuration space."""

from __future__ import annotations

from .config_places import ConfigPlaces
from .configuration_space import configuration_vector, coverage, ensemble, measure_next, specialists
from .pool import DonorPool, Priors, priors_of
from .population import Donor, bias_and_scale, donor_of, frozen, pool
from .selection import select, selection_strata

__all__ = [
    "ConfigPlaces",
    "Donor",
    "DonorPool",
    "Priors",
    "bias_and_scale",
    "configuration_vector",
    "coverage",
    "donor_of",
    "ensemble",
    "frozen",
    "measure_next",
    "pool",
    "priors_of",
    "select",
    "selection_strata",
    "specialists",
]
