"""Three everyday package names must be ours."""

import pytest

from collector.config.load import ConfigError
from collector.runtime.filesystem import PACKAGES, check_packages, package_files


@pytest.mark.parametrize("name", PACKAGES)
def test_a_foreign_package_is_named_with_its_path(name):
    ours = package_files()
    check_packages(ours)
    with pytest.raises(ConfigError, match=rf"package {name}: comes from /usr/lib/python3"):
        check_packages(ours | {name: "/usr/lib/python3/dist-packages/collector/__init__.py"})
