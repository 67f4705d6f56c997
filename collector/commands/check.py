"""Check a configuration as far as it can be without starting: learners, feature sets, ports, and the files it names."""

from __future__ import annotations

from itertools import combinations

from collector.config import Config, ConfigError, parse_endpoint
from collector.ingest import TokenFile, read_credentials
from collector.ingest.kv import check_kv
from collector.ingest.scrape import Scraper
from collector.runtime import Clock, Files
from collector.service import fitted_capacity, make_pipeline

_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104 -- compared, not bound


def check(config: Config, clock: Clock) -> None:
    """Raise ConfigError for the first thing that would keep the process from running with this configuration."""
    _check_ports(config)
    make_pipeline(config)
    read_credentials(config, clock)
    check_kv(config)
    Scraper(config, clock)  # reads token and certificates; asks nobody before its start
    if config.pages_token_file:
        TokenFile(config.pages_token_file, "pages_token_file", clock)


def remarks(config: Config, files: Files) -> list[str]:
    """What a start here would do otherwise than configured; nothing where its directory is not on this machine."""
    if config.durability != "log":
        return []
    _, problem = fitted_capacity(config, files)
    return [problem] if problem else []


def _check_ports(config: Config) -> None:
    """One port has one server."""
    endpoints = {"listen": config.listen, "pages": config.pages}
    if config.listen_http:
        endpoints["listen_http"] = config.listen_http
    for (key, text), (other_key, other_text) in combinations(endpoints.items(), 2):
        (host, port), (other_host, other_port) = parse_endpoint(text), parse_endpoint(other_text)
        overlap = host == other_host or host in _ANY_HOST or other_host in _ANY_HOST
        if port == other_port != 0 and overlap:
            raise ConfigError(other_key, f"port {port} is that of {key} already")
