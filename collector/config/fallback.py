"""What holds when a configuration is wrong and must not keep the process from running (``config.on_error: degrade``).

In a pod a sidecar that ends takes its vLLM out of service. There the last good configuration holds instead, kept beside
the snapshot by the last start that had one; without it, the defaults and those environment variables that can be used.
Defaults open nothing that was to be closed: where the wrong configuration names a token or a certificate anywhere, they
receive on the loopback alone and refuse the pages that a token would have closed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from .errors import ConfigError
from .load import ENV_PREFIX, load, read_yaml, to_yaml
from .receiver_config import ReceiversConfig
from .schema import Config, SnapshotConfig

LAST_GOOD: Final = "last-good-config.yaml"
"""Beside the snapshot; the effective configuration, environment and profile included."""

_ON_ERROR: Final = ("config", "on_error")
_DIRECTORY: Final = ("snapshot", "directory")
_CREDENTIAL: Final = re.compile(rb"(token|cert|key|ca)_file", re.IGNORECASE)

_log = logging.getLogger(__name__)


class Fallback(NamedTuple):
    """Why another configuration than the one given holds, which one, and whether the pages have to stay closed."""

    problem: str
    holds: str
    closed: bool

    def __str__(self) -> str:
        return f"{self.holds}: {self.problem}"


class Loaded(NamedTuple):
    """The configuration to run with, and why it is another than the one given (None: it is the one given)."""

    config: Config
    fallback: Fallback | None = None


def load_or_degrade(
    path: Path | None,
    environ: Mapping[str, str],
    profile: str | None = None,
    check: Callable[[Config], None] = lambda _: None,
) -> Loaded:
    """The configuration; if it is wrong, what ``config.on_error`` says: a ConfigError, or the next best one.

    Args:
        path: the file, if there is one.
        environ: the environment.
        profile: the name of a profile.
        check: raises ConfigError for what only shows when it is used (a feature set nobody knows, a missing file).
    """
    try:
        config = load(path, environ, profile)
        if config.config.on_error == "degrade":
            check(config)
    except ConfigError as error:
        tree = _readable_part(path)
        if _wanted(_ON_ERROR, tree, environ) != "degrade":
            raise
        problem = str(error).removeprefix("config error: ")
        last_good = _last_good(tree, environ, check)
        if last_good is not None:
            return Loaded(last_good, Fallback(problem, "the last good configuration holds", closed=False))
        closed = _names_credential(path, environ)
        defaults = load(None, _usable_variables(environ, check))
        if closed:
            defaults = msgspec.structs.replace(defaults, receivers=ReceiversConfig())
        return Loaded(defaults, Fallback(problem, "the defaults hold", closed))
    return Loaded(config)


def save_last_good(config: Config) -> None:
    """Keep a configuration that works for a start that has none; a disk that refuses is no reason to stop."""
    path = Path(config.snapshot.directory) / LAST_GOOD
    scratch = path.with_name(f".{LAST_GOOD}.tmp")
    try:
        scratch.write_text(to_yaml(config), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        _log.warning("last good configuration not kept: %s", error.strerror)


def _last_good(tree: Mapping[str, Any], environ: Mapping[str, str], check: Callable[[Config], None]) -> Config | None:
    directory = _wanted(_DIRECTORY, tree, environ)
    path = Path(directory if isinstance(directory, str) else SnapshotConfig().directory) / LAST_GOOD
    try:
        config = load(path, {})
        check(config)
    except ConfigError:
        return None
    return config


def _usable_variables(environ: Mapping[str, str], check: Callable[[Config], None]) -> dict[str, str]:
    """Those that can be used together; one that cannot is left out."""
    usable: dict[str, str] = {}
    for variable, value in ((name, environ[name]) for name in environ if name.startswith(ENV_PREFIX)):
        try:
            check(load(None, usable | {variable: value}))
        except ConfigError:
            continue
        usable[variable] = value
    return usable


def _readable_part(path: Path | None) -> Mapping[str, Any]:
    """What the file says, right or wrong; nothing if it is no YAML."""
    try:
        return read_yaml(path) if path is not None else {}
    except ConfigError:
        return {}


def _wanted(key: tuple[str, str], tree: Mapping[str, Any], environ: Mapping[str, str]) -> object:
    section, name = key
    variable = f"{ENV_PREFIX}{section}__{name}".upper()
    if variable in environ:
        return environ[variable]
    below = tree.get(section)
    return below.get(name) if isinstance(below, Mapping) else None


def _names_credential(path: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether a token or TLS is asked for anywhere; the text is searched, because it may be no YAML."""
    if any(variable.startswith(ENV_PREFIX) and _CREDENTIAL.search(variable.encode()) for variable in environ):
        return True
    try:
        return path is not None and _CREDENTIAL.search(path.read_bytes()) is not None
    except OSError:
        return False
