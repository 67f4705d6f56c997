"""The modelling systems of the sources, each a table of (name, unit, formula, reference).

Importing this package registers their live forms as feature sets: columns that are constant within one configuration
are left out there and serve transfer (``full``).
"""

from online.features.systems.base import System, full, live_columns, systems
from online.features.systems.bsr_ard import BSR_ARD
from online.features.systems.hfd_tl import HFD_TL
from online.features.systems.incumbents import BLACKBOX, ROOFLINE
from online.features.systems.mole_rd import MOLE_RD
from online.features.systems.physics import PHYSICS
from online.features.systems.picf import PICF
from online.features.systems.portable import PORTABLE
from online.features.systems.rece import RECE

SYSTEMS: tuple[System, ...] = (PHYSICS, BLACKBOX, ROOFLINE, PICF, MOLE_RD, HFD_TL, BSR_ARD, RECE)
"""Beside ``portable``; the order of documents and tables."""

for _system in SYSTEMS:
    _system.register()

__all__ = [
    "BLACKBOX",
    "BSR_ARD",
    "HFD_TL",
    "MOLE_RD",
    "PHYSICS",
    "PICF",
    "PORTABLE",
    "RECE",
    "ROOFLINE",
    "SYSTEMS",
    "System",
    "full",
    "live_columns",
    "systems",
]
