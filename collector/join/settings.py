"""Bounds of the join, each named and configured: the sections ``join`` and ``dedupe`` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec

Bound = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a row waits for the journeys that complete it, and what may be held meanwhile.

    Times are event time: what the telemetry says, never when it was processed.
    """

    window_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 180.0
    """A step whose requests have not all finished by then is used with what is known."""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 20.0
    """How late a span may arrive after its end: 5 s batching, retries, reordering."""
    steps_max: Bound = 65_536
    """Steps held per engine process."""
    requests_max: Bound = 20_000
    """Finished requests and API spans waiting for their other half, per engine."""
    engines_max: Bound = 64
    """Engines held; the one silent longest makes room."""
    row_steps_max: Bound = 512
    """Longest interval that still gives a row: long intervals sum their stalls."""
    warm_up_rows: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 64
    """Rows of a new engine process held until its one-time compilation can be told from its pace."""
    kv_batches_max: Bound = 65_536
    """Batches of KV events held per publisher process."""
    block_steps: Annotated[int, msgspec.Meta(ge=256, le=65_536)] = 512
    """Steps after which what they taught about their engine comes into force: larger is cheaper, and reacts later."""
    quick_lane: bool = True
    """Send rows down the quick lane too: live prediction and drift do not wait for journeys."""


class DedupeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how many span ids are remembered (event time)."""

    window_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 600.0
    ids_max: Bound = 100_000
    emitters_max: Bound = 256
