"""What other configurations know: donors, data sheets, the configuration space."""

from __future__ import annotations

from .configuration_space import (
    configuration_vector,
    coverage,
    ensemble,
    measure_next,
    specialists,
)
from .pool import DonorPool, Priors, priors_of
from .pooled import Donor, bias_and_scale, donor_of, donors_of, frozen, pool
from .sheet import HIDES_HITS, SheetEstimate, SheetPrior

__all__ = [
    "HIDES_HITS",
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
