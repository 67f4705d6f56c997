"""Every key, and how a configuration is read: msgspec and yaml, nothing of ours."""

from __future__ import annotations

from .load import (
    ENV_FILE,
    ENV_PREFIX,
    ConfigError,
    Loaded,
    every_key,
    explain_key,
    explain_keys,
    json_schema,
    load,
    load_or_degrade,
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
    "explain_keys",
    "is_endpoint",
    "json_schema",
    "load",
    "load_or_degrade",
    "parse_endpoint",
    "parse_owned",
    "scraping",
    "suggestion",
    "to_tree",
    "to_yaml",
    "with_scheme",
]
