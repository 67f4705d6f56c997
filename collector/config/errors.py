"""Bad configuration: the one error that names a key."""

from __future__ import annotations


class ConfigError(Exception):
    """Bad configuration: ``key`` is the dotted path or the environment variable at fault."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"config error: {key}: {problem}")
        self.key = key
        self.problem = problem
