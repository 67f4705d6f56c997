"""What other configurations know: donors, pool, configuration space."""

from __future__ import annotations

from .config_places import ConfigPlaces
from .configuration_space import configuration_vector, coverage, ensemble, measure_next, specialists
from .pool import DonorPool, Priors, priors_of
from .population import Donor, bias_and_scale, donor_of, donors_of, frozen, pool
from .sheet_estimate import SheetEstimate, SheetPrior
from .sheet_terms import HIDES_HITS

__all__ = [
    "HIDES_HITS",
    "ConfigPlaces",
    "Donor",
    "DonorPool",
    "Priors",
    "SheetEstimate",
    "SheetPrior",
    "bias_and_scale",
    "configuration_vector",
    "coverage",
    "donor_of",
    "donors_of",
    "ensemble",
    "frozen",
    "measure_next",
    "pool",
    "priors_of",
    "specialists",
]
