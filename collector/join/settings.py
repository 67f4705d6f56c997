"""Bounds of the join, each named and configured."""

from __future__ import annotations

import msgspec


class JoinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are event time: what the telemetry says, never when it was processed."""

    window_s: float = 180.0
    """A step whose requests have not all finished by then is used with what is known."""
    grace_s: float = 20.0
    """How late a span may arrive after its end: 5 s batching, retries, reordering."""
    steps_max: int = 65_536
    """Steps held per engine process."""
    requests_max: int = 20_000
    """Finished requests and API spans waiting for their other half, per engine."""
    engines_max: int = 64
    """Engines held; the one silent longest makes room."""
    row_steps_max: int = 512
    """Longest interval that still gives a row: long intervals sum their stalls."""
    warm_up_rows: int = 64
    """Rows of a new engine process held until its one-time compilation can be told from its pace."""
    kv_batches_max: int = 65_536
    """Batches of KV events held per publisher process."""
    block_steps: int = 512
    """Steps after which what they taught about their engine comes into force: larger is cheaper, and reacts later."""
    quick_lane: bool = True
    """Send rows down the quick lane too: live prediction and drift do not wait for journeys."""
