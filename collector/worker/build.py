"""From configuration to pipeline: what is joined and learned, the same for live and replay."""

from __future__ import annotations

from pathlib import Path

from collector import __version__
from collector.config import Config, ConfigError
from collector.durable import learners_of
from collector.identity import Knowledge
from online import BankSettings, StateError
from online.drift import DriftSettings
from online.rls import LearnerSettings

from .pipeline import Pipeline


def bank_settings(config: Config) -> BankSettings:
    """What to learn with; a learner or feature set nobody knows is a ConfigError."""
    bank = BankSettings(
        learners=config.learners,
        feature_sets=config.feature_sets,
        custom=config.custom,
        block_rows=config.bank.block_rows,
        block_ns=int(config.bank.block_s * 1e9),
        configs_max=config.bank.configs_max,
        live_sets=config.live_sets,
        rls=LearnerSettings(drift=DriftSettings(detector=config.bank.detector)),
    )
    try:
        bank.check()
    except ValueError as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(key, problem) if problem else ConfigError("custom", key) from None
    return bank


def make_pipeline(config: Config, knowledge: Knowledge | None = None) -> Pipeline:
    """The pipeline that the configuration asks for."""
    bank = bank_settings(config)
    pipeline = Pipeline(config, bank, __version__, knowledge or Knowledge(config.configurations))
    for number, path in enumerate(config.donors):
        try:
            pipeline.add_donors(learners_of(Path(path).read_bytes()))
        except OSError as error:
            raise ConfigError(f"donors[{number}]", f"{path}: cannot be read: {error.strerror}") from None
        except StateError as error:
            raise ConfigError(f"donors[{number}]", f"{path}: {error}") from None
    return pipeline
