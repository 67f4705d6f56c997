"""What is in a sidecar's state file: everything a restart needs, so that stop and restart is no restart.

    progress   how far journal and snapshots had come
    spans      span ids seen lately
    join       every engine process's window, requests and API spans that wait, rows held for their turn, KV publishers
    learners   everything learned, partial blocks included (the part that ``replay --state`` writes alone)

What of each class is saved stands in the class (``STATE``); the file is described in online/state/file.py. Decoded
layouts (collector/decode/columnar.py) are a cache and stay out. Bounds and settings are the new process's: what is held
beyond a bound that has become smaller goes as it would have gone anyway.

Guarantee: a pipeline restored from the state of another one gives bitwise the same rows and coefficients for the same
further exports (tests/property/test_sidecar_state.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from online.state import Count, Image, decode, saved

PROGRESS, SPANS, JOIN = "progress", "spans", "join"


@dataclass(frozen=True, slots=True)
class Progress:
    """``seq`` is the last journal entry in a state, ``generation`` the last snapshot published before it."""

    STATE = saved("progress")

    seq: Count = 0
    generation: Count = 0


def read_image(data: bytes) -> Image:
    """The image in a file.

    Raises:
        StateError: truncated, corrupt, not a state file, or of a version that cannot be read.
    """
    return decode(data)


def progress_of(image: Image) -> Progress:
    """How far it had come."""
    progress: Progress = image.load(PROGRESS, Progress)
    return progress
