"""Sheets: what a model and a GPU are, in numbers; pure parsers and formulas, the files are read elsewhere."""

from online.features.sheets.hardware import find

from .architecture import SheetError, architecture
from .deployment import Sheet, sheet_of
from .hardware import HardwareSheet, hardware_sheets
from .model import model_sheet

__all__ = [
    "HardwareSheet",
    "Sheet",
    "SheetError",
    "architecture",
    "find",
    "hardware_sheets",
    "model_sheet",
    "sheet_of",
]
