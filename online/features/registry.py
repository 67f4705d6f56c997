"""Which feature sets there are, and for which targets and configurations each is available.

A factory makes a set from the target and the facts of a configuration (model, gpu, tensor_parallel_size, ...). It
returns None where the set does not apply: a set that needs the model's sheet has nothing to say about a model it does
not know, and that is not an error. A name that nobody registered is one, and is raised when the bank is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from online.rows import Floats, Target

from .columns import INTERCEPT, Column, FeatureSet, raw_column

Fact = str | int | float | bool
Facts = Mapping[str, Fact]
Factory = Callable[[Target, Facts], FeatureSet | None]

_FACTORIES: dict[str, Factory] = {}

_PORTABLE: dict[Target, tuple[str, ...]] = {
    Target.STEP_TIME: (INTERCEPT, "prefill_tokens", "decode_context_tokens", "requests"),
    Target.GPU_TIME: (INTERCEPT, "prefill_tokens", "decode_context_tokens", "requests"),
    Target.SCHEDULE_TIME: (INTERCEPT, "requests", "prefill_requests"),
    Target.API_QUEUEING: (INTERCEPT, "prompt_tokens"),
    Target.QUEUE_WAIT: (INTERCEPT, "waiting", "prompt_tokens"),
    Target.POST_DECODE: (INTERCEPT, "output_tokens"),
    Target.FIRST_RESPONSE: (INTERCEPT,),
    Target.PREEMPTION_GAP: (INTERCEPT,),
}

_BLIS = "the basis of BLIS's trained-physics backend: what every consumer understands"
ACTIVE_EXPERTS = "active_experts"
"""Share of the experts of a layer that a step's tokens touch; its coefficient is the time that all of them take."""


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
    """The set that needs no data sheet and exists for every target.

    Step times of a mixture of experts have ``active_experts`` as well, where its experts are known.
    """
    columns = tuple(raw_column(name, _BLIS) for name in _PORTABLE[target])
    experts = experts_in(facts or {}) if target is Target.STEP_TIME else None
    return FeatureSet("portable", target, columns if experts is None else (*columns, active_experts(*experts)))


def experts_in(facts: Facts) -> tuple[int, int] | None:
    """Experts of a layer, and how many of them a token goes through; None for a dense model or where one is unknown."""
    experts, per_token = facts.get("num_experts"), facts.get("num_experts_per_tok")
    if type(experts) is not int or type(per_token) is not int:
        return None
    is_mixture = 0 < per_token < experts and facts.get("num_moe_layers") != 0
    return (experts, per_token) if is_mixture else None


def active_experts(experts: int, per_token: int) -> Column:
    """The share of E experts that are touched if each token of the step picks its k at random."""
    return Column(
        ACTIVE_EXPERTS,
        "us",
        lambda raw: np.asarray(share_touched(experts, per_token, raw["prefill_tokens"] + raw["decode_tokens"])),
        "experts touched, if routing is even",
    )


def share_touched(experts: int, per_token: int, tokens: Floats | float) -> Floats | float:
    """1 - (1 - k/E)^tokens."""
    return 1.0 - np.power(1.0 - per_token / experts, np.maximum(tokens, 0.0))


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
