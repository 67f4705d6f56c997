"""Sheets: what a model and a GPU are, in numbers; pure parsers and formulas, the files are read elsewhere."""

from online.features.sheets.hardware import find

from .architecture import SheetError, architecture, quantized
from .deployment import Sheet, sheet_of
from .hardware import HardwareSheet, hardware_sheets
from .model import model_sheet
from .quantization import bytes_by_name

__all__ = [
    "HardwareSheet",
    "Sheet",
    "SheetError",
    "architecture",
    "bytes_by_name",
    "find",
    "hardware_sheets",
    "model_sheet",
    "quantized",
    "sheet_of",
]
