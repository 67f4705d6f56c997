"""What other configurations know: data sheets and donors."""

from __future__ import annotations

from .donors import Donor, DonorPool, Priors, donor_of, pool, priors_of
from .sheet import HIDES_HITS, SheetPrior

__all__ = ["HIDES_HITS", "Donor", "DonorPool", "Priors", "SheetPrior", "donor_of", "pool", "priors_of"]
