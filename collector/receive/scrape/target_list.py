"""Which servers there are: a static list, the addresses behind a name, and files in Prometheus's file discovery format.

    [{"targets": ["10.0.0.7:8000", ...], "labels": {"__scheme__": "https", "__metrics_path__": "/metrics"}}, ...]

JSON or YAML. Names and files are looked at again every ``refresh_s``; while a name does not resolve or a file cannot be
read, what it gave before stays.
"""

from __future__ import annotations

import logging
import socket
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from collector.config import ScrapeConfig, ScrapeEndpoint

from .page_client import ScrapeTarget

FILE_BYTES_MAX = 2**20
_log = logging.getLogger(__name__)

Resolve = Callable[[str, int], list[str]]


def addresses_of(host: str, port: int) -> list[str]:
    """All addresses behind a name, sorted; OSError if it has none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


class TargetList:
    """Remembers what each source gave last."""

    def __init__(self, config: ScrapeConfig, resolve: Resolve = addresses_of) -> None:
        self._config = config
        self._resolve = resolve
        self._known: dict[str, list[ScrapeTarget]] = {}

    @property
    def static(self) -> bool:
        """Whether looking again can change nothing."""
        return not self._config.files and all(each.resolve == "one" for each in self._config.endpoints)

    def look(self) -> list[ScrapeTarget]:
        """All servers as of now, without doubles, at most ``servers_max``."""
        problems = []
        for endpoint in self._config.endpoints:
            problems += self._look_at(endpoint.url, lambda endpoint=endpoint: self._behind(endpoint))  # type: ignore[misc]
        for path in self._config.files:
            problems += self._look_at(path, lambda path=path: read_targets(Path(path)))  # type: ignore[misc]
        if problems:
            _log.warning("scrape targets of %s", "; ".join(problems))
        every = dict.fromkeys(target for targets in self._known.values() for target in targets)
        return list(every)[: self._config.servers_max]

    def _look_at(self, source: str, read: Callable[[], list[ScrapeTarget]]) -> list[str]:
        try:
            self._known[source] = read()
        except (OSError, ValueError) as error:
            return [f"{source.partition('?')[0]}: {error}"]  # a token may stand behind it
        return []

    def _behind(self, endpoint: ScrapeEndpoint) -> list[ScrapeTarget]:
        if endpoint.resolve == "one":
            return [ScrapeTarget(endpoint.url)]
        parts = urllib.parse.urlsplit(endpoint.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return [ScrapeTarget(endpoint.url, address) for address in self._resolve(parts.hostname or "", port)]


def read_targets(path: Path, default_path: str = "/metrics") -> list[ScrapeTarget]:
    """Targets of one file; ``default_path``: what is asked of those that name none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no list of targets.
    """
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError("larger than 1 MiB")
    try:
        groups: Any = yaml.safe_load(data)  # JSON is YAML
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"neither JSON nor YAML ({type(error).__name__})") from None
    out = []
    for group in groups if isinstance(groups, list) else [groups]:
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list):
            raise ValueError("expected a list of groups with targets")  # noqa: TRY004 -- of the file, not of ours
        labels = group.get("labels") or {}
        if not isinstance(labels, dict):
            raise ValueError("expected labels with their values")  # noqa: TRY004
        scheme, where = labels.get("__scheme__", "http"), labels.get("__metrics_path__", default_path)
        out += [ScrapeTarget(_checked(scheme, target, where)) for target in targets]
    return out


def _checked(scheme: object, target: object, where: object) -> str:
    texts = all(isinstance(part, str) for part in (scheme, target, where))
    url = f"{scheme}://{target}{where}" if texts else ""
    try:
        return msgspec.convert({"url": url}, ScrapeEndpoint).url
    except msgspec.ValidationError:  # what stands before an @ is a password
        raise ValueError(f"{url.rpartition('@')[2][:256]!r} is no target") from None
