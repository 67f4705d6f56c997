"""Keys of the way from spans to coefficients: how rows are completed, and how they are learned."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .section import Bound, Section


class JoinConfig(Section, frozen=True, kw_only=True):
    """How long a row waits for the journeys that complete it, and what may be held meanwhile.

    Times are event time: what the telemetry says, never when it was processed.
    """

    window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="How long a step waits for the journeys of its requests; then it is used with what is known.",
        ),
    ] = 180.0
    grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="How late a span may arrive after its end: batching of 5 s, retries, reordering.",
        ),
    ] = 20.0
    steps_max: Annotated[
        Bound, Meta(description="Steps held per engine process; beyond it the oldest are used with what is known.")
    ] = 65_536
    requests_max: Annotated[
        Bound, Meta(description="Finished requests and API spans waiting for their other half, per engine.")
    ] = 20_000
    engines_max: Annotated[
        Bound, Meta(description="Engines held; one silent for `join.window_s` makes room, else a newcomer is refused.")
    ] = 64
    page_engines_max: Annotated[
        Bound, Meta(description="Engines known by their pages alone; the one not scraped for longest makes room.")
    ] = 1024
    row_steps_max: Annotated[
        Bound, Meta(description="Longest interval of steps that still gives a row: long ones sum their stalls.")
    ] = 512
    warm_up_rows: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Rows of a new engine process held until its one-time compilation can be told from its pace.",
        ),
    ] = 64
    block_steps: Annotated[
        int,
        Meta(
            ge=256,
            le=65_536,
            description="Steps after which what they taught of their engine holds: larger is cheaper and reacts later.",
        ),
    ] = 512


class DedupeConfig(Section, frozen=True, kw_only=True):
    """How long and how many span ids are remembered (event time)."""

    window_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86_400,
            description="How long a span id is remembered: an export sent again within it changes nothing.",
        ),
    ] = 600.0
    ids_max: Annotated[Bound, Meta(description="Span ids remembered per sender.")] = 100_000
    emitters_max: Annotated[
        Bound, Meta(description="Senders whose span ids are remembered; the one silent for longest makes room.")
    ] = 256


class BankConfig(Section, frozen=True, kw_only=True):
    """Bounds of the learners."""

    block_rows: Annotated[
        Bound, Meta(description="Rows after which a block is learned, at most: larger is cheaper and reacts later.")
    ] = 512
    block_s: Annotated[
        float, Meta(ge=0.001, le=3_600, description="Event time after which a block is learned, at the latest.")
    ] = 1.0
    detector: Annotated[
        str,
        Meta(
            description="What tells a change of speed: `cusum`, `adwin`, `page_hinkley` or `none`. With `none`"
            " coefficients follow one as slowly as the rarest kind of step forgets."
        ),
    ] = "cusum"
    river_rows_per_s: Annotated[
        float,
        Meta(
            ge=1,
            le=1_000_000,
            description="Rows per second of event time that each River model sees of a target: bounds its cost.",
        ),
    ] = 32.0
    configs_max: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Configurations learned at once; a newcomer is refused while all are alive."),
    ] = 64
