"""Sheets: what a model and a GPU are, in numbers; pure parsers and formulas, the files are read elsewhere."""

from online.features.sheets.architecture import SheetError, architecture
from online.features.sheets.deployment import Sheet, sheet_of
from online.features.sheets.hardware import HardwareSheet, hardware_sheets
from online.features.sheets.model import ModelSheet, model_sheet

__all__ = [
    "HardwareSheet",
    "ModelSheet",
    "Sheet",
    "SheetError",
    "architecture",
    "hardware_sheets",
    "model_sheet",
    "sheet_of",
]
