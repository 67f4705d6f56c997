"""The newest snapshot as the client library sees it, so that nothing here predicts by sums of its own.

A configuration is read when it is first asked for, once a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tracefit
from exporters.per_generation import PerGeneration
from online import ConfigSnapshot, Snapshot


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


def index_of(configs: Sequence[ConfigSnapshot], which: str) -> int:
    """Which of them is meant, as ``find_config`` of the client understands it.

    Raises:
        NotFoundError: none is, or several that are alive.
    """
    return tracefit.find_config(
        [(each.config_id, each.config) for each in configs],
        which,
        heard_unix_nano=[each.last_heard_unix_nano for each in configs],
        replaced=[bool(each.replaced_by) for each in configs],
    )


class ClientView:
    """Configurations of the newest snapshot.

    Args:
        source: returns the newest snapshot, or None before the first; what is shown at the moment.
    """

    def __init__(self, source: Callable[[], Snapshot | None]) -> None:
        self.snapshot = source
        self._configs = PerGeneration[str, tracefit.Config]()

    def config(self, snapshot: Snapshot, which: str = "") -> tracefit.Config:
        """The only configuration that is meant, as ``find_config`` of the client understands it.

        Raises:
            NotFoundError: none is, or several that are alive.
            LoadError: the client cannot read it.
        """
        configs = snapshot.configs
        meant = next((each for each in configs if each.config_id == which), None)
        if meant is None:
            meant = configs[index_of(configs, which)]
        return self._configs.get(lambda: snapshot, meant.config_id, lambda _: client_config(meant))
