"""Whether the journal fits on its volume, beside three states: two generations, and the next one while it is written.

A journal that fills its volume keeps out the state that would empty it, and no restart changes that. So the journal
gets what the volume has beyond three states, at most ``journal.capacity_mib``. A volume that is too small even for the
states is shared equally: a quarter is the journal's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from collector.config import Config
from collector.runtime import Files

from .journal import is_segment
from .store import STATE_FILES

STATES: Final = 3
ENGINE_STATE_BYTES: Final = 1 << 20
"""Of one engine in a state: up to 4,000 steps that wait, with 270 bytes each (docs/reliability.md)."""
_MIB: Final = 1 << 20


def fitted_capacity(config: Config, files: Files) -> tuple[int, str]:
    """Bytes that the journal may have, and a sentence if they are fewer than configured.

    As configured where the volume says nothing about its size.
    """
    directory, wanted_bytes = Path(config.snapshot.directory), config.journal.capacity_mib * _MIB
    state_bytes, held_bytes = config.join.engines_max * ENGINE_STATE_BYTES, 0
    try:
        volume = files.volume(directory)
        for path in directory.iterdir():
            if path.name in STATE_FILES:
                state_bytes = max(state_bytes, path.stat().st_size)
            if path.name in STATE_FILES or is_segment(path.name):
                held_bytes += path.stat().st_size
    except OSError:
        return wanted_bytes, ""
    room_bytes = volume.free_bytes + held_bytes
    fitting_bytes = max(room_bytes - STATES * state_bytes, room_bytes // (STATES + 1))
    if not volume.size_bytes or fitting_bytes >= wanted_bytes:
        return wanted_bytes, ""
    fitting_mib, room_mib, states_mib = (each / _MIB for each in (fitting_bytes, room_bytes, STATES * state_bytes))
    return fitting_bytes, (
        f"the journal has {fitting_mib:.3g} MiB instead of {config.journal.capacity_mib} (journal.capacity_mib): "
        f"the volume of {directory} has room for {room_mib:.3g} MiB, of which three states may need {states_mib:.3g}"
    )
