"""From configuration to pipeline: what is joined and learned, the same for live and replay."""

from __future__ import annotations

from pathlib import Path

from collector import __version__
from collector.config import Config, ConfigError
from collector.identity import Knowledge
from online import StateError, check_settings

from .pipeline import Pipeline


def check_learning(config: Config) -> None:
    """Raises ConfigError for a learner, feature set or detector that nobody knows."""
    try:
        check_settings(config)
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(key, problem) if problem else ConfigError("custom", key) from None


def make_pipeline(config: Config, knowledge: Knowledge | None = None) -> Pipeline:
    """The pipeline that the configuration asks for."""
    check_learning(config)
    pipeline = Pipeline(config, __version__, knowledge or Knowledge(config))
    for number, path in enumerate(config.donors):
        try:
            pipeline.add_donors(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"donors[{number}]", f"{path}: cannot be read: {error.strerror}") from None
        except StateError as error:
            raise ConfigError(f"donors[{number}]", f"{path}: {error}") from None
    return pipeline
