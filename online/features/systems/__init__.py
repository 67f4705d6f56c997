"""The modelling systems of the sources, each a table of (name, unit, formula, reference).

Importing this package registers their live forms as feature sets: columns that are constant within one configuration
are left out there and serve transfer (``full``).
"""

from .base import PHYSICS, PORTABLE, System, full
from .sources import BLACKBOX, BSR_ARD, HFD_TL, MOLE_RD, PICF, RECE, RESIDUAL, ROOFLINE

SYSTEMS: tuple[System, ...] = (PHYSICS, BLACKBOX, ROOFLINE, PICF, MOLE_RD, HFD_TL, BSR_ARD, RECE)
"""Beside ``portable``; the order of documents and tables."""

for _system in SYSTEMS:
    _system.register()

__all__ = [
    "BSR_ARD",
    "HFD_TL",
    "PHYSICS",
    "PORTABLE",
    "RECE",
    "RESIDUAL",
    "SYSTEMS",
    "System",
    "full",
]
