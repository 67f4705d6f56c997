"""A snapshot: where it comes from, whether there is a newer one, and its configurations."""

from __future__ import annotations

import os

from .changes import Diff, compared
from .configured import Config
from .document import Document, parse
from .faults import LoadError, checked
from .fetching import BYTES_MAX, fetch, is_url, read_file
from .selection import find_config, names_of


class Snapshot:
    """What was learned at one moment; see :func:`load`.

    Attributes:
        generation, created_unix_nano, tracefit_version: of the document.
        configs: every configuration in it.
        data: the document as it came, to keep as a file.
    """

    def __init__(self, document: Document, data: bytes, source: _Source) -> None:
        self.generation = document.generation
        self.created_unix_nano = document.created_unix_nano
        self.tracefit_version = document.tracefit_version
        self._heard_unix_nano = [each.last_heard_unix_nano for each in document.configs]
        self._replaced = [each.replaced for each in document.configs]
        identities = [(each.config_id, each.facts) for each in document.configs]
        names = names_of(identities, self._heard_unix_nano, self._replaced)
        self.configs: tuple[Config, ...] = tuple(
            Config(described, name=name) for described, name in zip(document.configs, names, strict=True)
        )
        self.data = data
        self._document = document
        self._source = source

    def __repr__(self) -> str:
        noun = "configuration" if len(self.configs) == 1 else "configurations"
        return f"<tracefit.Snapshot generation {self.generation}, {len(self.configs)} {noun}>"

    def refresh(self) -> Snapshot:
        """The newest one from where this came from; this very one if nothing is new (a URL is asked by ETag).

        Raises:
            LoadError: as :func:`load`; this snapshot stays good.
        """
        return self._source.load(self)

    def config(self, config_id: str = "", *, model: str = "", gpu: str = "") -> Config:
        """The only configuration that fits; where several do, the only one of them whose engine is alive.

        One is alive unless its server sends another configuration now, or another one that fits was heard of more than
        ten minutes later.

        Args:
            config_id: the whole, the beginning, or what people call it, like ``llama h100``, ``8B · H100 · TP 2`` or
                words of its ``name``.
            model: a part of the name is enough, in any case of letters.
            gpu: the same.

        Raises:
            NotFoundError: none fits, or several that are alive; it lists them.
        """
        identities = [(each.config_id, each.facts) for each in self.configs]
        heard, replaced = self._heard_unix_nano, self._replaced
        index = find_config(identities, config_id, model=model, gpu=gpu, heard_unix_nano=heard, replaced=replaced)
        return self.configs[index]

    def diff(self, other: Snapshot) -> Diff:
        """What changed from this one to ``other``; see :class:`Diff`."""
        return compared(self._document, other._document)


class _Source:
    """Where a snapshot comes from, and what tells whether it is new."""

    def __init__(self, source: str | bytes, token: str | None, timeout_s: float) -> None:
        self._source = source
        self._token = token
        self._timeout_s = timeout_s
        self._tag = ""

    def load(self, current: Snapshot | None) -> Snapshot:
        tag = self._tag if current is not None else ""
        source = self._source
        if isinstance(source, bytes):
            if current is not None:
                return current
            return Snapshot(parse(source, "this"), source, self)
        if is_url(source):
            fetched = fetch(source, token=self._token, tag=tag, timeout_s=self._timeout_s)
        else:
            fetched = read_file(source, tag)
        if fetched.data is None:
            assert current is not None  # noqa: S101 - only a tag makes it None
            return current
        snapshot = Snapshot(parse(fetched.data, source), fetched.data, self)
        self._tag = fetched.tag
        return snapshot


def load(source: str | bytes | os.PathLike[str], *, token: str | None = None, timeout_s: float = 10.0) -> Snapshot:
    """A snapshot from a file, a URL or bytes.

    Args:
        source: a path, an http(s) URL (``http://host:9464`` means its ``/snapshot``), or the document itself.
        token: sent as a bearer token, to that host only.
        timeout_s: for the whole answer of a URL.

    Raises:
        LoadError: one sentence: not there, too slow, too big, a page for people, another schema, …
    """
    timeout_s = checked("timeout_s", timeout_s, 1e-3, 3600.0)
    if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
        raise LoadError("the token has characters that no header can hold")
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > BYTES_MAX:
            raise LoadError(f"this is larger than {BYTES_MAX >> 20} MiB, which no snapshot is")
        return _Source(bytes(source), token, timeout_s).load(None)
    where = os.fspath(source)
    if not where:
        raise LoadError("a snapshot is read from a path, a URL or bytes, and this is an empty text")
    return _Source(where, token, timeout_s).load(None)
