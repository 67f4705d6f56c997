"""``tracefit version``: what a report of a defect has to say of the installation."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from collector import __version__
from collector.runtime import EXIT_OK, PrintLine
from exporters.what_if import as_json
from online import SCHEMA
from online.state import VERSION as STATE_VERSION

_LIBRARIES = ("numpy", "grpcio", "msgspec", "prometheus-client", "river")
"""What results and crashes depend on; river is imported only when a learner of it is configured."""


def tell_version(*, in_json: bool, say: PrintLine) -> int:
    """Say the version, or everything about it as one JSON document."""
    libraries = {name: _installed(name) for name in _LIBRARIES}
    if in_json:
        tree = {"version": __version__, "python": platform.python_version(), "platform": platform.platform()}
        say(as_json({**tree, "snapshot_schema": SCHEMA, "state_version": STATE_VERSION, "libraries": libraries}))
        return EXIT_OK
    say(f"tracefit {__version__}, Python {platform.python_version()}, {platform.platform()}")
    say(f"snapshot {SCHEMA}, state version {STATE_VERSION}")
    say(", ".join(f"{name} {installed or 'not installed'}" for name, installed in libraries.items()))
    return EXIT_OK


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
