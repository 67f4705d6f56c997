"""Which feature sets there are, and for which targets and configurations each is available.

A factory makes a set from the target and the facts of a configuration (model, gpu, tensor_parallel_size, ...). It
returns None where the set does not apply: a set that needs the model's sheet has nothing to say about a model it does
not know, and that is not an error. A name that nobody registered is one, and is raised when the bank is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from online.rows import Target

from .columns import INTERCEPT, Column, FeatureSet, raw_column

Fact = str | int | float | bool
Facts = Mapping[str, Fact]
Factory = Callable[[Target, Facts], FeatureSet | None]

_FACTORIES: dict[str, Factory] = {}

_PORTABLE: dict[Target, tuple[str, ...]] = {
    Target.STEP_TIME: (INTERCEPT, "prefill_tokens", "decode_context_tokens", "requests"),
    Target.SCHEDULE_TIME: (INTERCEPT, "requests", "prefill_requests"),
    Target.API_QUEUEING: (INTERCEPT, "prompt_tokens"),
    Target.QUEUE_WAIT: (INTERCEPT, "waiting", "prompt_tokens"),
    Target.POST_DECODE: (INTERCEPT, "output_tokens"),
    Target.FIRST_RESPONSE: (INTERCEPT,),
    Target.PREEMPTION_GAP: (INTERCEPT,),
}

_BLIS = "the basis of BLIS's trained-physics backend: what every consumer understands"


def register(name: str, factory: Factory) -> None:
    """Make a feature set available under a name; a later registration of the same name replaces the earlier."""
    _FACTORIES[name] = factory


def registered() -> tuple[str, ...]:
    """Names a configuration may use, beside ``custom``."""
    return tuple(sorted(_FACTORIES))


def build(name: str, target: Target, facts: Facts) -> FeatureSet | None:
    """The set for one target of one configuration, or None where it does not apply.

    Raises:
        ValueError: if no set of that name is registered.
    """
    if name not in _FACTORIES:
        raise ValueError(f"feature set {name!r} is not one of {', '.join(registered())}")
    return _FACTORIES[name](target, facts)


def portable(target: Target, facts: Facts | None = None) -> FeatureSet:
    """The set that needs no data sheet and exists for every target."""
    del facts
    return FeatureSet("portable", target, tuple(raw_column(name, _BLIS) for name in _PORTABLE[target]))


def custom(target: Target, names: Sequence[str]) -> FeatureSet:
    """Raw columns by name, from the configuration; ``intercept`` is one of them only if it is listed.

    Raises:
        ValueError: if a name is not in the target's vocabulary.
    """
    known = (INTERCEPT, *target.vocabulary)
    for name in names:
        if name not in known:
            raise ValueError(f"custom feature {name!r} of {target} is not one of {', '.join(known)}")
    return FeatureSet("custom", target, tuple(raw_column(name, "configuration") for name in names))


_SHRINK_ROWS = 4.0
_SHAPE_EDGES = (1, 2, 3, 4, 5, 9, 17, 33, 65, 129)


def _batch_indicator(low: int, high: float) -> Column:
    label = str(low) if high == low + 1 else f"{low}-{high - 1:.0f}" if high < float("inf") else f"{low}+"
    return Column(
        name=f"batch_{label}",
        unit="us",
        formula=lambda raw: ((raw["requests"] >= low) & (raw["requests"] < high)).astype(float),
        reference="GEMV to GEMM jumps and cheap multiples: no linear form can follow them",
        signed=True,
        shrink=_SHRINK_ROWS,
    )


def shape(target: Target, facts: Facts | None = None) -> FeatureSet | None:
    """``portable`` and one free offset per batch size: for live prediction only, of step_time only."""
    del facts
    if target is not Target.STEP_TIME:
        return None
    edges = (*_SHAPE_EDGES, float("inf"))
    indicators = tuple(_batch_indicator(int(low), high) for low, high in itertools.pairwise(edges))
    prefill = Column(
        name="has_prefill",
        unit="us",
        formula=lambda raw: (raw["prefill_tokens"] > 0).astype(float),
        reference="leaving the decode-only graph",
        signed=True,
        shrink=_SHRINK_ROWS,
    )
    return FeatureSet("shape", target, (*portable(target).columns, *indicators, prefill))


register("portable", portable)
register("shape", shape)
