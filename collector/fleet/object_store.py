"""Object stores by fsspec, which is an extra: most fleets are asked over HTTP."""

from __future__ import annotations

import logging
from typing import Any, Final

from collector.runtime import StartError

_TALKATIVE: Final = ("aiobotocore", "azure", "gcsfs")
"""They tell of every request, with its headers."""


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it; StartError if a package is missing."""
    try:
        import fsspec  # noqa: PLC0415
    except ImportError:
        raise StartError(f"{url} needs a package that is not installed: install tracefit's extra fleet") from None
    try:
        storage, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StartError(f"cannot read {url}: {error}") from None
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.WARNING)
    return storage, str(path)
