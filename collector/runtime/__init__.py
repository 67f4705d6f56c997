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
    cannot_listen,
    limit_bytes,
    resident_bytes,
    sentence,
)
from .loop import Background, end_tasks, in_own_thread, running, serve
from .tasks import Clock, Health, Part, SteadyClock, Task
from .terminal import (
    REPORT_ONCE,
    PrintLine,
    configure_logs,
    print_stderr,
    print_stdout,
    progress,
    set_log_level,
)

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_USAGE",
    "REPORT_ONCE",
    "Background",
    "Clock",
    "Health",
    "MemoryGuard",
    "Part",
    "PrintLine",
    "StartError",
    "SteadyClock",
    "SystemFiles",
    "Task",
    "cannot_listen",
    "configure_logs",
    "end_tasks",
    "in_own_thread",
    "limit_bytes",
    "print_stderr",
    "print_stdout",
    "progress",
    "resident_bytes",
    "running",
    "sentence",
    "serve",
    "set_log_level",
]
