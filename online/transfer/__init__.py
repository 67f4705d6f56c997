"""What other configurations know: donors, pool, configuration space."""

from __future__ import annotations

from .pool import DonorPool, Priors, priors_of
from .population import Donor, donor_of, pool
from .selection import select, strata_of

__all__ = [
    "Donor",
    "DonorPool",
    "Priors",
    "donor_of",
    "pool",
    "priors_of",
    "select",
    "strata_of",
]
