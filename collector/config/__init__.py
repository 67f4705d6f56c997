"""Every key, and how a configuration is read: msgspec and yaml, nothing of ours."""

from __future__ import annotations

from .load import (
    ENV_FILE,
    ENV_PREFIX,
    ConfigError,
    Loaded,
    every_key,
    explain_key,
    is_page_url,
    json_schema,
    load,
    load_or_degrade,
    read_file,
    scraping,
    suggestion,
    to_tree,
    to_yaml,
    with_scheme,
)
from .schema import (
    PROFILES,
    Config,
    Endpoint,
    Owned,
    Rule,
    is_endpoint,
    parse_endpoint,
    parse_owned,
)

__all__ = [
    "ENV_FILE",
    "ENV_PREFIX",
    "PROFILES",
    "Config",
    "ConfigError",
    "Endpoint",
    "Loaded",
    "Owned",
    "Rule",
    "every_key",
    "explain_key",
    "is_endpoint",
    "is_page_url",
    "json_schema",
    "load",
    "load_or_degrade",
    "parse_endpoint",
    "parse_owned",
    "read_file",
    "scraping",
    "suggestion",
    "to_tree",
    "to_yaml",
    "with_scheme",
]
