"""Check a configuration as far as it can be without starting: learners, feature sets, and the files it names."""

from __future__ import annotations

from collector.config import Config
from collector.receive import TokenFile
from collector.receive.otlp import read_credentials
from collector.runtime import Clock
from collector.worker import make_pipeline


def check(config: Config, clock: Clock) -> None:
    """Raise ConfigError for the first thing that would keep the process from running with this configuration."""
    make_pipeline(config)
    read_credentials(config.receivers, clock)
    if config.exporters.http.token_file:
        TokenFile(config.exporters.http.token_file, "exporters.http.token_file", clock)
