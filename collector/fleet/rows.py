"""Rows that a fleet's recordings were learned from, as Parquet: ``PLACE/config=…/target=…/<engine>.parquet``."""

from __future__ import annotations

import hashlib
import urllib.parse
from typing import Any, Final, NamedTuple

import numpy as np

from collector.join import ConfigKeyChanged, Event, Rows
from online import PHASES, Quality, Target

from .sources import open_store

FEATURES: Final = tuple(
    dict.fromkeys([*Target.STEP_TIME.vocabulary, *Target.API_QUEUEING.vocabulary, *Target.QUEUE_WAIT.vocabulary])
)


class EngineKey(NamedTuple):
    """The recording that an engine is in, and its name there."""

    recording: str
    instance: str

    @property
    def file_name(self) -> str:
        """The engine's name, for whoever reads which file was left out, and a digest that makes it the only one."""
        digest = hashlib.sha256("\0".join(self).encode("utf-8", "surrogateescape")).hexdigest()
        return f"engine-{urllib.parse.quote(self.instance, safe='', errors='replace')[:80]}-{digest[:16]}"


class RowTable:
    """The rows of one engine, from its pipeline's events.

    All files have the same columns (docs/fleet.md). Raw features are summed over the steps of a row; one that the
    telemetry did not tell, or that rows of this target have not, is null.
    """

    def __init__(self, key: EngineKey) -> None:
        self._key = key
        self._tables: dict[tuple[str, Target], list[Any]] = {}

    def record(self, event: Event) -> None:
        """Take what concerns rows."""
        if isinstance(event, ConfigKeyChanged):
            for config_id, target in [known for known in self._tables if known[0] == event.old]:
                self._tables.setdefault((event.new, target), [])[:0] = self._tables.pop((config_id, target))
        elif isinstance(event, Rows):
            self._tables.setdefault((event.config_id, event.target), []).append(self._table(event))

    def write(self, place: str) -> None:
        """Write what there is below a directory or a URL."""
        for (config_id, target), tables in sorted(self._tables.items()):
            import pyarrow as pa  # noqa: PLC0415
            from pyarrow import parquet  # noqa: PLC0415

            storage, folder = open_store(f"{place.rstrip('/')}/config={config_id}/target={target.value}")
            storage.makedirs(folder, exist_ok=True)
            table = pa.concat_tables(tables)
            parquet.write_table(
                table, f"{folder}/{self._key.file_name}.parquet", filesystem=storage, compression="zstd"
            )

    def _table(self, event: Rows) -> Any:
        import pyarrow as pa  # noqa: PLC0415

        rows, known = event.rows, event.target.vocabulary
        sums = np.add.reduceat(rows.raw, rows.offsets[:-1], axis=0)
        absent = np.full(len(rows), np.nan)
        numbers = {f"phase_{name}": rows.phase[:, column] for column, name in enumerate(PHASES)}
        numbers |= {name: sums[:, known.index(name)] if name in known else absent for name in FEATURES}
        return pa.table(
            {
                "engine": pa.array(
                    [event.engines.get(number, "") for number in rows.engine.tolist()]
                ).dictionary_encode(),
                "recording": pa.array([self._key.recording] * len(rows)).dictionary_encode(),
                "end_unix_nano": pa.array(rows.end_ns, pa.int64()),
                "elapsed_us": pa.array(rows.elapsed_us, pa.float64()),
                "steps": pa.array(np.diff(rows.offsets), pa.int64()),
                "weight": pa.array(rows.weight, pa.float64()),
                "quality": pa.array([Quality(each).label for each in rows.quality.tolist()]).dictionary_encode(),
                **{name: pa.array(values, pa.float64(), from_pandas=True) for name, values in numbers.items()},
            }
        )
