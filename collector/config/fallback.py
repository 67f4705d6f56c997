"""What holds when a configuration is wrong and must not end the process (``config.on_error: degrade``).

In a pod a sidecar that ends takes its vLLM out of service. There the defaults hold instead, with those environment
variables that can be used. They open nothing that was to be closed: where the wrong configuration names a token or a
certificate anywhere, they receive on the loopback alone and refuse the pages that a token would have closed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from .config_error import ConfigError
from .load import ENV_PREFIX, load, read_yaml
from .receiver_config import ReceiversConfig
from .schema import Config

_ON_ERROR: Final = f"{ENV_PREFIX}CONFIG__ON_ERROR"
_CREDENTIAL: Final = re.compile(rb"(token|cert|key|ca)_file", re.IGNORECASE)


class Fallback(NamedTuple):
    """Why the defaults hold instead of the configuration given, and whether the pages have to stay closed."""

    problem: str
    closed: bool

    def __str__(self) -> str:
        return f"the defaults hold: {self.problem}"


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
    """The configuration; if it is wrong, what ``config.on_error`` says: a ConfigError, or the defaults.

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
        if not _must_run(path, environ):
            raise
        closed = _names_credential(path, environ)
        defaults = load(None, _usable_variables(environ, check))
        if closed:
            defaults = msgspec.structs.replace(defaults, receivers=ReceiversConfig())
        return Loaded(defaults, Fallback(str(error).removeprefix("config error: "), closed))
    return Loaded(config)


def _must_run(path: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether ``config.on_error`` is ``degrade``, as far as a wrong configuration can say so."""
    if _ON_ERROR in environ:
        return environ[_ON_ERROR] == "degrade"
    try:
        section = read_yaml(path).get("config") if path is not None else None
    except ConfigError:
        return False
    return isinstance(section, dict) and section.get("on_error") == "degrade"


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


def _names_credential(path: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether a token or TLS is asked for anywhere; the text is searched, because it may be no YAML."""
    if any(variable.startswith(ENV_PREFIX) and _CREDENTIAL.search(variable.encode()) for variable in environ):
        return True
    try:
        return path is not None and _CREDENTIAL.search(path.read_bytes()) is not None
    except OSError:
        return False
