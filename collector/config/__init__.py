"""Every key, and how a configuration is read: msgspec and yaml, nothing of ours."""

from __future__ import annotations

from .config_error import ConfigError, suggestion
from .fallback import Fallback, Loaded, load_or_degrade
from .identity_config import ConfigurationsConfig, DiscoveryConfig, DiscoveryEndpoint, RuleConfig
from .keys import explain_key
from .learning_config import BankConfig, DedupeConfig, JoinConfig
from .load import ENV_FILE, ENV_PREFIX, json_schema, load, profile_names, scraping, to_tree, to_yaml
from .receiver_config import (
    GrpcConfig,
    HttpReceiverConfig,
    KvConfig,
    KvEndpoint,
    ReceiversConfig,
    ScrapeConfig,
    ScrapeEndpoint,
    TlsConfig,
)
from .schema import Config
from .section import Endpoint, is_endpoint, parse_endpoint

__all__ = [
    "ENV_FILE",
    "ENV_PREFIX",
    "BankConfig",
    "Config",
    "ConfigError",
    "ConfigurationsConfig",
    "DedupeConfig",
    "DiscoveryConfig",
    "DiscoveryEndpoint",
    "Endpoint",
    "Fallback",
    "GrpcConfig",
    "HttpReceiverConfig",
    "JoinConfig",
    "KvConfig",
    "KvEndpoint",
    "Loaded",
    "ReceiversConfig",
    "RuleConfig",
    "ScrapeConfig",
    "ScrapeEndpoint",
    "TlsConfig",
    "explain_key",
    "is_endpoint",
    "json_schema",
    "load",
    "load_or_degrade",
    "parse_endpoint",
    "profile_names",
    "scraping",
    "suggestion",
    "to_tree",
    "to_yaml",
]
