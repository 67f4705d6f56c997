"""Rows as Parquet: what was learned from, for pandas, polars or DuckDB (docs/fleet.md has the schema).

    OUT/config=<config_id>/target=step_time/<engine>.parquet

One file for each engine, configuration and target, in event-time order. All have the same columns. Raw features are
summed over the steps of a row; one that the telemetry did not tell, or that rows of this target have not, is null. The
same recordings give the same files.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from collector.fleet.object_store import open_store
from collector.join import Event, Renamed, Rows
from collector.runtime import StartError
from online import PHASES, Quality, RowBlock, Target

BUFFERED_ROWS: Final = 100_000
FEATURES: Final = tuple(
    dict.fromkeys([*Target.STEP_TIME.vocabulary, *Target.API_QUEUEING.vocabulary, *Target.QUEUE_WAIT.vocabulary])
)
_T = TypeVar("_T")


def check_rows_place(place: str) -> None:
    """StartError if rows cannot be written there, before anything is learned."""
    try:
        import pyarrow as pa  # noqa: F401, PLC0415
    except ImportError:
        raise StartError("--rows needs packages that are not installed: install tracefit's extra fleet") from None
    if "://" in place:
        open_store(place)


class RowTable:
    """The rows of one engine, from its pipeline's events."""

    def __init__(self, engine: str, recording: str) -> None:
        self._engine = engine
        self._recording = recording
        self._blocks: dict[tuple[str, Target], list[Rows]] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="tracefit-rows-")
        self._written: dict[tuple[str, Target], list[Path]] = {}
        self._held = 0

    def record(self, event: Event) -> None:
        """Take what concerns rows."""
        if isinstance(event, Renamed):
            _rename(self._blocks, event.old, event.new)
            _rename(self._written, event.old, event.new)
        elif isinstance(event, Rows):
            self._blocks.setdefault((event.config_id, event.target), []).append(event)
            self._held += len(event.rows)
            if self._held >= BUFFERED_ROWS:
                self._spill()

    def write(self, place: str) -> None:
        """Write all of it below a directory or a URL; the engine's files are replaced as one step each."""
        from pyarrow import parquet  # noqa: PLC0415

        self._spill()
        name = hashlib.sha256(f"{self._recording}\0{self._engine}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
        for (config_id, target), pieces in sorted(self._written.items()):
            folder = f"{place.rstrip('/')}/config={config_id}/target={target.value}"
            whole = Path(self._scratch.name, "whole")
            with parquet.ParquetWriter(whole, _schema(), compression="zstd") as writer:
                for piece in pieces:
                    writer.write_table(parquet.read_table(piece))
            _put(whole, folder, f"{name}.parquet")
        self._scratch.cleanup()

    def _spill(self) -> None:
        from pyarrow import parquet  # noqa: PLC0415

        for key, blocks in self._blocks.items():
            pieces = self._written.setdefault(key, [])
            path = Path(self._scratch.name, f"{key[0]}-{key[1].value}-{len(pieces)}")
            columns = [_columns(block.rows, key[1], block.engines, self._recording) for block in blocks]
            joined = {name: np.concatenate([block[name] for block in columns]) for name in columns[0]}
            parquet.write_table(_table(joined), path)
            pieces.append(path)
        self._blocks, self._held = {}, 0


def _rename(known: dict[tuple[str, Target], list[_T]], old: str, new: str) -> None:
    for key in [key for key in known if key[0] == old]:
        known[new, key[1]] = known.pop(key) + known.get((new, key[1]), [])


def _columns(rows: RowBlock, target: Target, engines: Mapping[int, str], recording: str) -> dict[str, Any]:
    steps = np.diff(rows.offsets)
    sums = np.add.reduceat(rows.raw, rows.offsets[:-1], axis=0)
    return {
        "engine": np.array([engines.get(number, "") for number in rows.engine.tolist()], object),
        "recording": np.array([recording] * len(rows), object),
        "end_unix_nano": rows.end_ns,
        "elapsed_us": rows.elapsed_us,
        "steps": steps,
        "weight": rows.weight,
        "quality": np.array([Quality(each).label for each in rows.quality.tolist()], object),
        **{f"phase_{name}": rows.phase[:, column] for column, name in enumerate(PHASES)},
        **dict.fromkeys(FEATURES, np.full(len(rows), np.nan)),
        **{name: sums[:, column] for column, name in enumerate(target.vocabulary)},
    }


def _schema() -> Any:
    import pyarrow as pa  # noqa: PLC0415

    text = pa.dictionary(pa.int32(), pa.string())
    known = {
        "engine": text,
        "recording": text,
        "end_unix_nano": pa.int64(),
        "elapsed_us": pa.float64(),
        "steps": pa.int64(),
        "weight": pa.float64(),
        "quality": text,
    }
    floats = [*(f"phase_{name}" for name in PHASES), *FEATURES]
    return pa.schema([*known.items(), *((name, pa.float64()) for name in floats)])


def _table(columns: dict[str, Any]) -> Any:
    import pyarrow as pa  # noqa: PLC0415

    schema = _schema()
    arrays = [
        pa.array(columns[field.name], from_pandas=True).cast(field.type)
        if pa.types.is_floating(field.type)
        else pa.array(columns[field.name], type=field.type.value_type if pa.types.is_dictionary(field.type) else None)
        for field in schema
    ]
    arrays = [
        array.dictionary_encode() if pa.types.is_dictionary(field.type) else array
        for array, field in zip(arrays, schema, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _put(file: Path, folder: str, name: str) -> None:
    if "://" in folder:
        storage, path = open_store(folder)
        storage.put_file(str(file), f"{path}/{name}")
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f".{name}.tmp"
    temporary.write_bytes(file.read_bytes())
    temporary.replace(target / name)
