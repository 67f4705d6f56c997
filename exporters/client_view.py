"""The newest snapshot as the client library sees it, so that nothing here predicts by sums of its own.

A configuration is read when it is first asked for, once a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tracefit
from exporters.per_generation import PerGeneration
from online import ConfigSnapshot, Snapshot

_LISTED = 8


def client_config(config: ConfigSnapshot) -> tracefit.Config:
    """One configuration, by way of the document that the client reads.

    Raises:
        LoadError: the document is not what the client expects.
    """
    document = Snapshot(generation=0, created_unix_nano=0, tracefit_version="", configs=[config])
    try:
        return tracefit.load(document.to_json()).configs[0]
    except UnicodeEncodeError:
        raise tracefit.LoadError(f"a name in configuration {config.config_id} is no text") from None


class UnknownConfigError(LookupError):
    """No configuration of the newest snapshot, or more than one, is what was asked for; the text lists them."""

    def __init__(self, problem: str, configs: Sequence[ConfigSnapshot], *, several: bool) -> None:
        listed = ", ".join(each.config_id for each in configs[:_LISTED])
        more = f" and {len(configs) - _LISTED} more" if len(configs) > _LISTED else ""
        super().__init__(f"{problem}; the newest snapshot has {listed or 'none'}{more}")
        self.several = several


class ClientView:
    """Configurations of the newest snapshot.

    Args:
        source: returns the newest snapshot, or None before the first; what is shown at the moment.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self.snapshot = source
        self._configs = PerGeneration[str, tracefit.Config]()

    def config(self, snapshot: Snapshot, config_id: str = "") -> tracefit.Config:
        """The only configuration whose id is or begins so.

        Raises:
            UnknownConfigError: none is, or several.
            LoadError: the client cannot read it.
        """
        fitting = [each for each in snapshot.configs if each.config_id == config_id] or [
            each for each in snapshot.configs if each.config_id.startswith(config_id)
        ]
        if len(fitting) == 1:
            return self._configs.get(lambda: snapshot, fitting[0].config_id, lambda _: client_config(fitting[0]))
        if fitting:
            raise UnknownConfigError("several configurations fit", fitting, several=True)
        raise UnknownConfigError("no such configuration", snapshot.configs, several=False)
