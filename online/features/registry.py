"""Which feature sets there are, and for which targets and configurations each is available.

A factory makes a set from the target and the facts of a configuration (model, gpu, tensor_parallel_size, ...). It
returns None where the set does not apply: a set that needs the model's sheet has nothing to say about a model it does
not know, and that is not an error. A name that nobody registered is one, and is raised when the bank is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from online.rows import Target

from .columns import INTERCEPT, FeatureSet, raw_column

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


register("portable", portable)
