"""What any service has: tasks, clock, health, stop, logs, memory, file system, exit codes, progress."""

from __future__ import annotations

from .clock import Clock, SteadyClock, SystemClock
from .exits import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, StartError
from .filesystem import Files, SystemFiles, sync_directory
from .grpc_threads import serve_where_read
from .guard import check_packages, package_files
from .health import Health
from .logs import TOLD_ONCE, configure_logs, set_log_format, set_log_level
from .memory import (
    LARGE_BLOCK_BYTES,
    MemoryGuard,
    cgroup_limit_bytes,
    give_back,
    limit_bytes,
    resident_bytes,
    tune_malloc,
    without_collection,
)
from .progress import Progress
from .stop import Stop
from .tasks import Part, Task
from .terminal import PrintLine, TerminalRemarks, print_in_any_encoding, remarks_on
from .turns import offer_turn, take_turns

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_USAGE",
    "LARGE_BLOCK_BYTES",
    "TOLD_ONCE",
    "Clock",
    "Files",
    "Health",
    "MemoryGuard",
    "Part",
    "PrintLine",
    "Progress",
    "StartError",
    "SteadyClock",
    "Stop",
    "SystemClock",
    "SystemFiles",
    "Task",
    "TerminalRemarks",
    "cgroup_limit_bytes",
    "check_packages",
    "configure_logs",
    "give_back",
    "limit_bytes",
    "offer_turn",
    "package_files",
    "print_in_any_encoding",
    "remarks_on",
    "resident_bytes",
    "serve_where_read",
    "set_log_format",
    "set_log_level",
    "sync_directory",
    "take_turns",
    "tune_malloc",
    "without_collection",
]
