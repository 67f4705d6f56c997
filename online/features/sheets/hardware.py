"""Hardware sheets: data-sheet limits of a GPU. The table itself is ``hardware.json`` beside this file.

Peaks are dense (without structured sparsity), per GPU, per direction where a link is concerned as the maker counts it
(NVLink: both directions together). A machine of one's own goes into the configuration with the same keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from .architecture import SheetError


class HardwareSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU.

    Attributes:
        name: how it is called here.
        tflops: peak dense TFLOP/s by dtype (``bf16``, ``fp16``, ``fp8``, ``int8``, ``fp32``).
        memory_bandwidth_gb_s: of its memory.
        memory_gb: capacity.
        sm_count: streaming multiprocessors, or compute units.
        link_gb_s: to the other GPUs of the node; None where the only way is the host link.
        host_link_gb_s: PCIe or the like, both directions together.
        source: where the numbers are from.
        aliases: other spellings, as ``hw.gpu.name`` may have them.
        note: what one should know.
    """

    name: str
    tflops: dict[str, float]
    memory_bandwidth_gb_s: float
    memory_gb: float
    source: str
    sm_count: int | None = None
    link_gb_s: float | None = None
    host_link_gb_s: float | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has."""
        numbers: dict[str, float | int | None] = {
            "memory_bandwidth_gb_s": self.memory_bandwidth_gb_s,
            "memory_gb": self.memory_gb,
            "sm_count": self.sm_count,
            "link_gb_s": self.link_gb_s,
            "host_link_gb_s": self.host_link_gb_s,
            **{f"tflops.{dtype}": value for dtype, value in self.tflops.items()},
        }
        for key, value in numbers.items():
            if value is not None and not (math.isfinite(value) and 0 < value < 1e9):  # noqa: PLR2004  a sanity bound
                raise ValueError(f"{key}: expected a positive number, got {value!r}")
        if not self.tflops:
            raise ValueError("tflops: expected at least one dtype")

    def peak_tflops(self, dtype: str) -> float:
        """Peak for a dtype; the nearest slower one the sheet has where it does not have it."""
        for name in _FALLBACK.get(dtype, (dtype,)):
            if name in self.tflops:
                return self.tflops[name]
        return min(self.tflops.values())

    def facts(self, dtype: str) -> dict[str, str | int | float | bool]:
        """The sheet as facts of a configuration that computes in ``dtype``."""
        found: dict[str, str | int | float | bool | None] = {
            "peak_tflops": self.peak_tflops(dtype),
            "memory_bandwidth_gb_s": self.memory_bandwidth_gb_s,
            "memory_gb": self.memory_gb,
            "sm_count": self.sm_count,
            "link_gb_s": self.link_gb_s,
            "host_link_gb_s": self.host_link_gb_s,
        }
        return {name: value for name, value in found.items() if value is not None}


_FALLBACK = {
    "bfloat16": ("bf16", "fp16"),
    "float16": ("fp16", "bf16"),
    "auto": ("bf16", "fp16"),
    "float32": ("tf32", "fp32"),
    "fp8": ("fp8", "int8", "bf16", "fp16"),
}


def hardware_sheets(table: object) -> dict[str, HardwareSheet]:
    """Sheets by name, from parsed JSON: ``{name: {...}}``.

    Raises:
        SheetError: the table is not one; the text names the entry and the key.
    """
    if not isinstance(table, Mapping):
        raise SheetError(f"hardware: expected an object of sheets, got {type(table).__name__}")
    out: dict[str, HardwareSheet] = {}
    for name, entry in table.items():
        if not isinstance(entry, Mapping):
            raise SheetError(f"hardware.{name}: expected an object, got {type(entry).__name__}")
        try:
            out[str(name)] = msgspec.convert({"name": str(name), **_short_forms(entry)}, HardwareSheet)
        except (msgspec.ValidationError, ValueError) as error:
            raise SheetError(f"hardware.{name}: {error}") from None
    return out


def _short_forms(entry: Mapping[str, Any]) -> dict[str, Any]:
    """``compute_tflops_<dtype>`` is a short form of ``tflops``; a source of one's own need not be named."""
    out = {key: value for key, value in entry.items() if not str(key).startswith("compute_tflops_")}
    peaks = {
        str(key).removeprefix("compute_tflops_"): value
        for key, value in entry.items()
        if str(key).startswith("compute_tflops_")
    }
    if peaks:
        out.setdefault("tflops", peaks)
    out.setdefault("source", "configuration")
    return out


def find(sheets: Mapping[str, HardwareSheet], gpu: str) -> HardwareSheet | None:
    """The sheet a GPU's name means: ``NVIDIA H100 80GB HBM3`` is the H100 SXM; None for a name nobody knows."""
    wanted = _squeeze(gpu)
    best: tuple[int, HardwareSheet] | None = None
    for sheet in sheets.values():
        for alias in (sheet.name, *sheet.aliases):
            squeezed = _squeeze(alias)
            if squeezed and squeezed in wanted and (best is None or len(squeezed) > best[0]):
                best = (len(squeezed), sheet)
    return None if best is None else best[1]


def _squeeze(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()[:256])
