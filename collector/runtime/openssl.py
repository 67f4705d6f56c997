"""OpenSSL stays outside until somebody speaks TLS: loaded, it is 4.5 MB, resident.

Libraries import ``ssl`` beside what we need of them, and hashlib takes OpenSSL's functions where it has as good ones of
its own. While modules are imported within :func:`without_openssl`, ``ssl`` is a stand-in that knows the few names that
definitions mention; asked for any other, or later, it is the real one. asyncio, which grpcio imports and nobody here
uses, is told that there is none.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_SSL, _HASHES = "ssl", "_hashlib"
_NAMED: Final = {"SSLContext": object, "TLSVersion": object, "PROTOCOL_TLS_CLIENT": 16, "PROTOCOL_TLS_SERVER": 17}
"""In annotations and defaults of prometheus_client; the numbers are Python's own."""
_OWN_HASHES: Final = ("_sha256", "_sha2")
"""Python's, of which distributions may leave out what OpenSSL has; the second one from 3.12 on."""


class _StandIn(ModuleType):
    importing = True

    def __getattr__(self, name: str) -> Any:
        if self.importing and name in _NAMED:
            return _NAMED[name]
        if name.startswith("__"):  # the import system asks for some, to find out what is not there
            raise AttributeError(name)
        if sys.modules.get(_SSL) is self:
            del sys.modules[_SSL]
        return getattr(importlib.import_module(_SSL), name)


@contextlib.contextmanager
def without_openssl() -> Iterator[None]:
    """For imports; does nothing where OpenSSL is loaded already, or hashlib depends on it."""
    if _SSL in sys.modules or _HASHES in sys.modules or not any(map(find_spec, _OWN_HASHES)):
        yield
        return
    absent: dict[str, Any] = {_SSL: None, _HASHES: None}
    sys.modules.update(absent)
    importlib.import_module("asyncio")
    importlib.import_module("hashlib")
    stand_in = sys.modules[_SSL] = _StandIn(_SSL)
    try:
        yield
    finally:
        stand_in.importing = False
        if sys.modules[_SSL] is stand_in:
            del sys.modules[_SSL]
        del sys.modules[_HASHES]
