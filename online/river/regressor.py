"""River's LinearRegression over the columns of the corrector, imported without what else its package imports.

    w <- w - 0.03 g u     w0 <- w0 - 0.03 g     g: derivative of Huber's loss, threshold 0.05, of w . u + w0 - target

``river.linear_model`` imports every model in it, and one of them scipy.stats: a second of CPU and 50 MB beyond the
one module that is used here. ``river.optim`` imports scipy.special for a loss that is not used here, and that numpy's
tests and Fortran compiler: half of the 0.2 s and 25 MB that are left.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from typing import Any

import numpy as np

from online.rows import Floats
from online.state import Count, Finite, saved

from .context import CONTEXT

NAMES = (*CONTEXT.names, "day_sin", "day_cos")
_RATE, _THRESHOLD = 0.03, 0.05
_PACKAGE = "river.linear_model"
_SPECIAL = "scipy.special"


class Regressor:
    """River's linear regression over named columns; weights and intercept are kept here, so that they can be saved."""

    STATE = saved("regressor", weight=Floats, intercept=Finite, iterations=Count)

    __slots__ = ("_model", "intercept", "iterations", "weight")

    def __init__(self) -> None:
        self.weight = np.zeros(len(NAMES))
        self.intercept = 0.0
        self.iterations = 0
        self._model: Any = None

    def restored(self) -> None:
        """The model is made from what is saved once it is needed."""
        self._model = None

    def learn(self, columns: Floats, target: Floats) -> None:
        """One gradient step per row; columns (n, 11), target (n,)."""
        model = self._model
        if model is None:
            model = self._model = self._make_model()
        for row, value in zip(columns.tolist(), target.tolist(), strict=True):
            model.learn_one(dict(zip(NAMES, row, strict=True)), value)
        weights = model.weights
        self.weight = np.array([weights[name] for name in NAMES])
        self.intercept, self.iterations = float(model.intercept), int(model.optimizer.n_iterations)

    @property
    def finite(self) -> bool:
        """Whether it can go on."""
        return bool(np.isfinite(self.weight).all()) and math.isfinite(self.intercept)

    def _make_model(self) -> Any:
        optim = _optimizers()
        model = _linear_regression()(
            optimizer=optim.SGD(_RATE), loss=optim.losses.Huber(_THRESHOLD), intercept_lr=_RATE
        )
        model._weights.update(dict(zip(NAMES, self.weight.tolist(), strict=True)))  # noqa: SLF001  no other way in
        model.intercept, model.optimizer.n_iterations = self.intercept, self.iterations
        return model


class _OnFirstUse(types.ModuleType):
    """Stands where a module is imported; the module itself is, when something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        """Of the module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _optimizers() -> Any:
    """River's package of them."""
    special = sys.modules.setdefault(_SPECIAL, _OnFirstUse(_SPECIAL))
    try:
        return importlib.import_module("river.optim")
    finally:
        if isinstance(special, _OnFirstUse) and sys.modules.get(_SPECIAL) is special:
            del sys.modules[_SPECIAL]


def _linear_regression() -> Any:
    """The class, of its own module; a whole import of the package, then or later, finds the same one."""
    spec = None if _PACKAGE in sys.modules else importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        return importlib.import_module(_PACKAGE).LinearRegression
    bare: Any = types.ModuleType(_PACKAGE)
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules[_PACKAGE] = bare
    try:
        bare.base = importlib.import_module(f"{_PACKAGE}.base")
        return importlib.import_module(f"{_PACKAGE}.lin_reg").LinearRegression
    except (ImportError, AttributeError):  # another version of River keeps it elsewhere
        del sys.modules[_PACKAGE]
        return importlib.import_module(_PACKAGE).LinearRegression
    finally:
        if sys.modules.get(_PACKAGE) is bare:
            del sys.modules[_PACKAGE]
