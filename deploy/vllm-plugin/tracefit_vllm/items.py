"""What the tap hands to the exporter: plain values only, no reference to an object of vLLM."""

from __future__ import annotations

from typing import NamedTuple

from .journeys import Finished
from .kv import KvEvent


class StepRow(NamedTuple):
    """One sampled step: ids, times and counts in the order of ``encode.STEP_KEYS``."""

    unix_ns: int
    done_ns: int
    values: tuple[int, ...]


class SnapshotRows(NamedTuple):
    """The running requests of one step."""

    step: int
    unix_ns: int
    rows: list[tuple[str, str, int, int, int, int, int]]


class KvBatch(NamedTuple):
    """The KV-cache events published by one ``update_from_output()``; numbered as vLLM's own publisher numbers them."""

    unix_ns: int
    step: int
    rank: int
    sequence: int
    events: list[KvEvent]


Item = StepRow | SnapshotRows | KvBatch | Finished
