"""Files that say what a model or a GPU is: the sheets that come with the program, and config.json of a model.

Read at start, bounded and checked; what a file says wrongly is refused with a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from online.features import sheets
from online.features.sheets import HardwareSheet, architecture, hardware_sheets

from .facts import TEXT_CHARS_MAX, Fact

MODEL_FILE_BYTES_MAX = 4 * 2**20
"""The largest config.json in the wild is some hundred kB; more is something else."""
_QUANTIZATION_FILE = "hf_quant_config.json"


def shipped_sheets() -> dict[str, HardwareSheet]:
    """The table that comes with the program."""
    text = Path(sheets.__file__).with_name("hardware.json").read_bytes()
    return hardware_sheets(msgspec.json.decode(text))


class FileRefused(ValueError):
    """A file that cannot be what it should be; the text says why."""


def read_architecture(path: Path) -> dict[str, Fact]:
    """The architecture in a config.json, or in a directory that has one.

    A file hf_quant_config.json beside it says how the weights are quantized where config.json does not.

    Raises:
        FileRefused: a file cannot be read, is too large, or is not JSON.
        SheetError: it contradicts itself.
    """
    config = read_json(path / "config.json" if path.is_dir() else path)
    beside = (path if path.is_dir() else path.parent) / _QUANTIZATION_FILE
    if isinstance(config, dict) and beside.is_file():
        try:
            config = {**config, "hf_quant_config": read_json(beside)}
        except FileRefused as error:
            raise FileRefused(f"{_QUANTIZATION_FILE} beside it: {error}") from None
    arch = architecture(config)
    return {name: value[:TEXT_CHARS_MAX] if isinstance(value, str) else value for name, value in arch.items()}


def read_json(path: Path) -> Any:
    """A small JSON file.

    Raises:
        FileRefused: it cannot be read, is too large, or is not JSON.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MODEL_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise FileRefused(f"cannot be read: {error.strerror}") from None
    if len(data) > MODEL_FILE_BYTES_MAX:
        raise FileRefused(f"larger than {MODEL_FILE_BYTES_MAX >> 20} MiB")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FileRefused(f"not JSON: {str(error) or type(error).__name__}") from None
