"""Receives, decodes, joins; owns the process, the threads and the clock."""

from __future__ import annotations

__version__ = "0.1.0"
