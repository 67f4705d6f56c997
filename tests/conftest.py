"""Shared fixtures; a skip for a tool that CI installs is a failure there (TOOLS_REQUIRED=1).

TOOLS_ABSENT names what CI cannot install; .ci/run says so loudly.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.paths import DATA

# How long an example takes depends on who else uses the machine. A run proves the same as the one before it; new
# examples are looked for by `make explore`, and what it finds becomes an @example.
settings.register_profile("explore", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=500)
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, max_examples=30)
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three for two cores, because some tests wait for processes, sockets and clocks."""
    return 3 * (os.cpu_count() or 1) // 2 or 1


@pytest.fixture
def data_dir() -> Path:
    """The bundled recordings."""
    return DATA


def find_tool(name: str) -> str:
    """The path of an external tool; without it the test is skipped, or fails where tools are required."""
    path = shutil.which(name)
    if path is None:
        absent = os.environ.get("TOOLS_ABSENT", "").split()
        if os.environ.get("TOOLS_REQUIRED") == "1" and name not in absent:
            pytest.fail(f"{name} is required here and is not installed")
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture
def promtool() -> str:
    """Prometheus' own checker."""
    return find_tool("promtool")
