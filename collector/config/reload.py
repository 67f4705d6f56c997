"""The configuration file is looked at while we run: a ConfigMap that changes does not always need a restart.

What can be swapped between two turns is swapped (``RELOADABLE``); any other key that differs from what runs is named as
waiting for a restart; a file that is not valid changes nothing. All three are counted, and said on /readyz and on the
status page until the file is mended. Compared by content, because Kubernetes swaps a symlink: times and inodes lie.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from .errors import ConfigError
from .fallback import Fallback
from .schema import Config

RELOADABLE: Final = (
    "log_level",
    "snapshot.interval_s",
    "snapshot.publish_interval_s",
    "configurations.rules",
    "configurations.model_config",
    "configurations.hardware_file",
)
KEYS_NAMED_MAX: Final = 8

_log = logging.getLogger(__name__)


class Reload(enum.StrEnum):
    """What became of a changed file."""

    APPLIED = "applied"
    NEEDS_RESTART = "needs_restart"
    INVALID = "invalid"


class ConfigWatch:
    """Compares the file with what runs; ``poll`` is one look, ``poll_on_time`` one of many.

    Args:
        path: the file.
        read: the whole configuration as it would hold at a start; raises ConfigError.
        running: the configuration in force.
        apply: puts the reloadable keys of a configuration in force, all or (ConfigError) none.
        count: called with the outcome of every changed file.
        interval_s: between two looks.
        fallback: why ``running`` is not what the file says, if it is wrong from the start.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], Config],
        running: Config,
        *,
        apply: Callable[[Config], None],
        count: Callable[[Reload], None],
        interval_s: float,
        fallback: Fallback | None = None,
    ) -> None:
        self._path = path
        self._read = read
        self._running = running
        self._apply = apply
        self._count = count
        self._interval_s = interval_s
        self._content: bytes | str | None = None
        self._holds = fallback.holds if fallback is not None else "the former configuration stays"
        self.problem = str(fallback or "")
        """What is wrong with the file, or which keys wait for a restart; empty when it is what runs."""

    def poll_on_time(self) -> float:
        """Look once; the seconds until the next look."""
        self.poll()
        return self._interval_s

    def poll(self) -> Reload | None:
        """Look once; None if the file is what it was."""
        content = self._content_now()
        if content == self._content:
            return None
        first, self._content = self._content is None, content
        outcome = self._adopt(first=first)
        if outcome is not None:
            self._count(outcome)
        return outcome

    def _content_now(self) -> bytes | str:
        try:
            return self._path.read_bytes()
        except OSError:
            return "no file"

    def _adopt(self, *, first: bool) -> Reload | None:
        try:
            config = self._read()
            changed = differences(self._running, config)
            reloadable = [key for key in changed if key.startswith(RELOADABLE)]
            if reloadable:
                self._apply(config)
        except ConfigError as error:
            self.problem = f"{self._holds}: {error.key}: {error.problem}"
            _log.warning("%s", self.problem)
            return Reload.INVALID
        self._running = with_reloadable(self._running, config)
        waiting = [key for key in changed if key not in reloadable]
        self.problem = f"needs a restart: {', '.join(waiting[:KEYS_NAMED_MAX])}" if waiting else ""
        if first and not changed:
            return None
        applied, waits = ", ".join(reloadable) or "nothing", self.problem or "nothing waits for a restart"
        _log.info("configuration read again: %s applied, %s", applied, waits)
        return Reload.NEEDS_RESTART if waiting else Reload.APPLIED


def differences(old: Config, new: Config) -> list[str]:
    """Dotted keys with different values."""
    before, after = _flat(msgspec.to_builtins(old)), _flat(msgspec.to_builtins(new))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def with_reloadable(running: Config, new: Config) -> Config:
    """The running configuration with the reloadable keys of the new one."""
    replace = msgspec.structs.replace
    return replace(
        running,
        log_level=new.log_level,
        snapshot=replace(
            running.snapshot,
            interval_s=new.snapshot.interval_s,
            publish_interval_s=new.snapshot.publish_interval_s,
        ),
        configurations=replace(new.configurations, discovery=running.configurations.discovery),
    )


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[above + key] = value
    return flat
