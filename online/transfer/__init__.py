"""What other configurations know: donors, data sheets, the configuration space."""

from __future__ import annotations

from .pool import DonorPool, Priors, priors_of
from .pooled import (
    Donor,
    bias_and_scale,
    configuration_vector,
    coverage,
    donor_of,
    donors_of,
    ensemble,
    frozen,
    measure_next,
    pool,
    specialists,
)
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
