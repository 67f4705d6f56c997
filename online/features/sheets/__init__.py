"""Sheets: what a model and a GPU are, in numbers; pure parsers and formulas, the files are read elsewhere."""

from .deployment import HardwareSheet, Sheet, find, hardware_sheets, sheet_of
from .model import architecture, bytes_by_name, model_sheet, quantized

__all__ = [
    "HardwareSheet",
    "Sheet",
    "architecture",
    "bytes_by_name",
    "find",
    "hardware_sheets",
    "model_sheet",
    "quantized",
    "sheet_of",
]
