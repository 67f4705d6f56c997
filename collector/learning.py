"""From configuration to pipeline settings: what is decoded, joined and learned, the same for live and replay."""

from __future__ import annotations

from .config import Config
from .pipeline import Pipeline
from .telemetry import Metrics


def make_pipeline(config: Config, metrics: Metrics | None) -> Pipeline:
    """The pipeline that the configuration asks for; a learner or feature set nobody knows is a ConfigError."""
    return Pipeline()
