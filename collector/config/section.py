"""What sections of the configuration are made of: their base, and types that several keys have."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, Self, get_args

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of the configuration; a copy of what holds it copies the reference."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


def entry_of(kind: Any) -> type[Section] | None:
    """The section that a type holds as its entries, as a list of sections does."""
    for each in get_args(kind):
        if isinstance(each, type) and issubclass(each, Section):
            return each
        if (entry := entry_of(each)) is not None:
            return entry
    return None


Bound = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Mebibytes = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Endpoint(NamedTuple):
    """Where a server listens."""

    address: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


_HOST_PORT = (
    r"^(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+)"
    r":([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
)


HostPort = Annotated[str, msgspec.Meta(pattern=_HOST_PORT, title="host:port or [v6]:port; port 0 takes a free one")]


def is_endpoint(text: str) -> bool:
    """Whether it is a ``host:port``."""
    return re.search(_HOST_PORT, text) is not None


def parse_endpoint(text: str) -> Endpoint:
    """Split a checked ``host:port``."""
    address, _, port = text.rpartition(":")
    return Endpoint(address.strip("[]"), int(port))
