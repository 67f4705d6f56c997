"""Which configurations are gone because their server came back as another one.

A server that is started again under another ``service.instance.id`` is a new emitter, and nobody says that the old one
ended. It did if another one of its model began to send on the same machine (``host.name``; or, where nobody says it,
this one) after the old one's last event, and has gone on for longer than spans may be late. As soon as the old one
sends again, both are alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from collector.decode import Telemetry

from .emitter import Emitter, Key, key_of
from .places import newest_unix_ns

_HERE = "here"
_LOOPBACK = ("127.0.0.1:", "[::1]:", "%5B::1%5D:")
"""How addresses of senders on this machine begin, behind the kind of address."""


class Begin(NamedTuple):
    """On which machine an emitter runs, empty if unknown, and its first event, 0 if it was there before."""

    machine: str
    unix_ns: int

    @staticmethod
    def of(telemetry: Telemetry, *, first: bool) -> Begin:
        """As told by what an emitter sends; ``first``: nothing came from it before."""
        _, _, address = telemetry.peer.partition(":")
        machine = telemetry.host or (_HERE if address.startswith(_LOOPBACK) else "")
        return Begin(machine, newest_unix_ns(telemetry) if first else 0)


def replaced_configs(
    by_config: Mapping[str, Iterable[Emitter]], begins: Mapping[Key, Begin], late_ns: int
) -> dict[str, str]:
    """By configuration none of whose emitters is left: what the server sends now.

    Args:
        by_config: every configuration with its emitters.
        begins: of those heard of; the others are alive.
        late_ns: how late a span may come after its end.
    """
    heirs: dict[str, list[tuple[int, int, str, Emitter]]] = {}
    for config_id, emitters in by_config.items():
        for emitter in emitters:
            begin = begins.get(key_of(emitter))
            if begin is not None and begin.machine and begin.unix_ns:
                heirs.setdefault(begin.machine, []).append(
                    (begin.unix_ns, emitter.event_unix_ns - late_ns, config_id, emitter)
                )
    replaced = {}
    for config_id, emitters in by_config.items():
        found = [_heir_of(config_id, emitter, begins, heirs) for emitter in emitters]
        if found and all(found):
            replaced[config_id] = found[-1]
    return replaced


def _heir_of(
    config_id: str,
    emitter: Emitter,
    begins: Mapping[Key, Begin],
    heirs: Mapping[str, list[tuple[int, int, str, Emitter]]],
) -> str:
    begin, ended_ns = begins.get(key_of(emitter)), emitter.event_unix_ns
    if begin is None or emitter.recording:
        return ""
    later = [
        (begun_ns, other_id)
        for begun_ns, until_ns, other_id, other in heirs.get(begin.machine, ())
        if other_id != config_id and begun_ns >= ended_ns and until_ns > ended_ns and _same_model(emitter, other)
    ]
    return max(later, default=(0, ""))[1]


def _same_model(one: Emitter, other: Emitter) -> bool:
    model, others = one.facts.get("model"), other.facts.get("model")
    return model == others or None in (model, others)
