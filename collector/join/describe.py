"""What is known of a configuration, and whether more of it is known than when it was last described."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from online import Quality

from .emitter import Emitter, facts_of
from .events import Described


class Known(NamedTuple):
    """What is known of a configuration: the best telemetry that it sends, and the version of each emitter's facts."""

    quality: Quality
    versions: tuple[tuple[str, int], ...]


def _known_of(emitters: Iterable[Emitter]) -> Known:
    """What the emitters of one configuration say together."""
    emitters = list(emitters)
    return Known(
        min(emitter.quality for emitter in emitters),
        tuple((emitter.instance, emitter.facts.version) for emitter in emitters),
    )


def describe(emitters: Mapping[str, list[Emitter]], known: dict[str, Known]) -> list[Described]:
    """Configurations (``emitters`` by each) of which something else is known than before; ``known`` follows."""
    for gone in known.keys() - emitters.keys():
        del known[gone]
    described = []
    for config_id, own in sorted(emitters.items()):
        if known.get(config_id) != (now := _known_of(own)):
            known[config_id] = now
            described.append(Described(config_id, facts_of(own), now.quality))
    return described
