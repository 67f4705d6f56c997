"""What other configurations know: donors, pool, configuration space."""

from __future__ import annotations

from .pool import DonorPool
from .population import Donor, donor_of, pool
from .selection import select, strata_of

__all__ = [
    "Donor",
    "DonorPool",
    "donor_of",
    "pool",
    "select",
    "strata_of",
]
