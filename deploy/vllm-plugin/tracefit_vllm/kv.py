"""KV-cache and transfer events, as the engine hands them to its publisher.

Left out: token ids (prompt and response content), extra keys (they hold cache salts and media identifiers), session
ids, and the block hashes themselves, which derive from the tokens; their number is kept as ``block_count``.
"""

from __future__ import annotations

from typing import Any, Final

from .wire import Value

PRIVATE: Final = frozenset({"token_ids", "extra_keys", "session_id", "parent_block_hash"})

KvEvent = tuple[str, dict[str, Value]]


def plain(event: Any) -> KvEvent:
    """Return the event's type name and its scalar fields.

    Events are msgspec structs with different fields per version; ``__struct_fields__`` names them.
    """
    fields: dict[str, Value] = {}
    names = getattr(event, "__struct_fields__", None)
    for name in vars(event) if names is None else names:
        if name in PRIVATE:
            continue
        value = getattr(event, name)
        if name == "block_hashes":
            fields["block_count"] = len(value or ())
        elif isinstance(value, str | bool | int | float):
            fields[name] = value
    return type(event).__name__, fields
