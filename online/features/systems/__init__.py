"""The modelling systems of the sources, each a table of (name, unit, formula, reference).

Importing this package registers their live forms as feature sets: columns that are constant within one configuration
are left out there and serve transfer (``full``).
"""

from .base import System, full
from .dictionaries import BSR_ARD, HFD_TL, RECE, RESIDUAL
from .incumbents import BLACKBOX, ROOFLINE
from .mole_rd import MOLE_RD
from .physics import PHYSICS, PORTABLE
from .picf import PICF

SYSTEMS: tuple[System, ...] = (PHYSICS, BLACKBOX, ROOFLINE, PICF, MOLE_RD, HFD_TL, BSR_ARD, RECE)
"""Beside ``portable``; the order of documents and tables."""

for _system in SYSTEMS:
    _system.register()

__all__ = [
    "BSR_ARD",
    "HFD_TL",
    "PORTABLE",
    "RECE",
    "RESIDUAL",
    "SYSTEMS",
    "System",
    "full",
]
