"""What any service has: tasks, clock, health, stop, logs, memory, file system, exit codes, progress."""

from __future__ import annotations

from .filesystem import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    MemoryGuard,
    StartError,
    SystemFiles,
    cgroup_limit_bytes,
    check_packages,
    limit_bytes,
    package_files,
    resident_bytes,
    sync_directory,
)
from .loop import Background, IoLoop, begin
from .tasks import Clock, Health, Part, SteadyClock, Stop, SystemClock, Task, in_thread, serve
from .terminal import (
    TOLD_ONCE,
    PrintLine,
    configure_logs,
    note_above_bar,
    print_in_any_encoding,
    progress,
    set_log_format,
    set_log_level,
)

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_USAGE",
    "TOLD_ONCE",
    "Background",
    "Clock",
    "Health",
    "IoLoop",
    "MemoryGuard",
    "Part",
    "PrintLine",
    "StartError",
    "SteadyClock",
    "Stop",
    "SystemClock",
    "SystemFiles",
    "Task",
    "begin",
    "cgroup_limit_bytes",
    "check_packages",
    "configure_logs",
    "in_thread",
    "limit_bytes",
    "note_above_bar",
    "package_files",
    "print_in_any_encoding",
    "progress",
    "resident_bytes",
    "serve",
    "set_log_format",
    "set_log_level",
    "sync_directory",
]
