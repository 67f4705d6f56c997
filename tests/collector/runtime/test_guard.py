"""Three everyday package names must be ours."""

from __future__ import annotations

import pytest

from collector.config.load import ConfigError
from collector.runtime.filesystem import PACKAGES, check_packages, package_files


def test_our_own_packages_pass():
    files = package_files()
    assert set(files) == set(PACKAGES)
    check_packages(files)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_foreign_package_is_named_with_its_path(name):
    files = package_files() | {name: "/usr/lib/python3/dist-packages/collector/__init__.py"}
    with pytest.raises(ConfigError, match=rf"package {name}: comes from /usr/lib/python3"):
        check_packages(files)
