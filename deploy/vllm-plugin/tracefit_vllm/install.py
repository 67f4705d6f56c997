"""Where the plugin meets vLLM: ``Scheduler.__init__`` is wrapped as soon as its module is imported.

Not ``EngineCore.__init__``: that very method loads the plugins in a spawned engine core, so a patch made there comes
too late. Not by importing the scheduler's module: it is heavy, and most of vLLM's processes never need it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from .log import LOG
from .settings import SettingError, Settings, read_settings

PACKAGE: Final = "vllm.v1.core.sched"
MODULE: Final = f"{PACKAGE}.scheduler"
MARK: Final = "__tracefit__"


def install() -> None:
    """Patch the scheduler class, now or when it is imported; never raises."""
    try:
        settings = read_settings(os.environ)
        if not settings.enabled:
            return
        module = _imported_scheduler()
        if module is not None:
            patch(module, settings)
        elif not any(isinstance(finder, SchedulerFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, SchedulerFinder(settings))
    except SettingError as error:
        LOG.warning("tracefit: off, %s", error)
    except Exception:  # noqa: BLE001 an exception here would keep vLLM from starting
        LOG.warning("tracefit: off, could not be installed", exc_info=True)


def _imported_scheduler() -> ModuleType | None:
    """Return the scheduler's module if it was imported: only then its package, which is empty, has it as a name."""
    with contextlib.suppress(ImportError):
        module = getattr(importlib.import_module(PACKAGE), "scheduler", None)
        return module if hasattr(module, "Scheduler") else None
    return None


def patch(module: ModuleType, settings: Settings) -> None:
    """Wrap ``module.Scheduler.__init__`` so that each instance is tapped; once only."""
    scheduler_class = getattr(module, "Scheduler", None)
    if scheduler_class is None:
        LOG.warning("tracefit: off, %s has no Scheduler", MODULE)
        return
    original = scheduler_class.__init__
    if getattr(original, MARK, False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _attach(self, settings)

    setattr(wrapped, MARK, True)
    scheduler_class.__init__ = wrapped


def _attach(scheduler: Any, settings: Settings) -> None:
    try:
        from .tap import attach  # noqa: PLC0415 only a process with a scheduler pays for it

        attach(scheduler, settings)
    except Exception:  # noqa: BLE001 serving goes on without telemetry
        LOG.warning("tracefit: off, could not be attached", exc_info=True)


class SchedulerFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the scheduler's module and patches it once it has been executed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec the next finder gives, its loader's ``exec_module`` wrapped."""
        if fullname != MODULE:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute: Callable[[ModuleType], None] | None = getattr(loader, "exec_module", None)
        if execute is None:
            LOG.warning("tracefit: off, %s has an unknown kind of loader", MODULE)
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                patch(module, self._settings)
            except Exception:  # noqa: BLE001 the import itself must succeed
                LOG.warning("tracefit: off, %s could not be patched", MODULE, exc_info=True)

        # On the loader's instance: its type stays what inspect, linecache and torch expect.
        loader.exec_module = exec_module
