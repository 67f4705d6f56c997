"""How the process ends: exit codes, and the error that ends it at its start; input never raises.

Exception
├── ConfigError       exit 78: a key that does not exist or a value it cannot take
└── StartError        exit 1:  the machine refuses (a port in use, a directory that cannot be written)
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells have it."""


class StartError(Exception):
    """The configuration is fine, the environment is not; the text is one clear sentence."""
