"""What a prediction stands on: which coefficients are used, what was seen, and whether they may be bet on."""

from __future__ import annotations

from collections.abc import Collection

from .document import Model, Target
from .faults import NoCoefficientsError
from .shapes import stratum_of_cell

STEP_TIME = "step_time"
FEATURES = ("intercept", "prefill_tokens", "decode_context_tokens", "requests")
_ROWS_MIN = 256
_MEDIAN_APE_MAX = 0.25
BEYOND_SEEN_BATCHES = (
    "the model is a mixture of experts: larger batches touch more experts, which no coefficient counts, so nothing is "
    "usable beyond the batches that were seen"
)
"""What is said of answers and files of such a model, until its form has a column for experts."""
_OF_THE_BATCH = frozenset({"requests", "shape"})
_MEANS_OF_STEPS = ("journeys", "requests", "metrics")


def of_means(telemetry: str) -> bool:
    """Whether rows of this quality cover many steps each: what was learned is of mean steps, stalls included."""
    return telemetry in _MEANS_OF_STEPS


def visited_strata(target: Target, telemetry: str) -> frozenset[str]:
    """Strata with evidence; empty where nobody said.

    A row that is the mean of many steps nearly always has some prefill in it: of such rows only the batch size counts.
    """
    if target.seen is not None and target.seen.cells:
        strata = set(map(stratum_of_cell, target.seen.cells))
    else:
        strata = set(target.interval.strata if target.interval is not None else ())
    if of_means(telemetry):
        sizes = {name.partition(":")[2] for name in strata}
        strata = {f"{kind}:{size}" for kind in ("decode", "prefill") for size in sizes}
    return frozenset(strata)


def computable_model(config_id: str, name: str, target: Target | None) -> Model:
    """``portable``, else the champion; of a step only features that follow from what a step is asked by.

    Raises:
        NoCoefficientsError: there is none; it says which and why.
    """
    if target is None:
        raise NoCoefficientsError(f"configuration {config_id} has learned nothing about {name} yet")
    for key in ("portable", target.champion):
        model = target.models.get(key)
        if model is not None and model.coefficients and (name != STEP_TIME or _of_a_step(model)):
            return model
    wanted = " that can be computed from prefill tokens, requests and context" if name == STEP_TIME else ""
    listed = ", ".join(sorted(key for key, model in target.models.items() if model.coefficients))
    raise NoCoefficientsError(
        f"configuration {config_id} publishes no coefficients of {name}{wanted}"
        + (f" (only {listed})" if listed else "")
    )


def _of_a_step(model: Model) -> bool:
    return all(each.name in FEATURES for each in model.coefficients)


def caveats_of(outside: Collection[str], *, mixture_of_experts: bool) -> tuple[str, ...]:
    """Why an answer that lies outside of what was seen in these is never usable; empty where coefficients decide."""
    return (BEYOND_SEEN_BATCHES,) if mixture_of_experts and not _OF_THE_BATCH.isdisjoint(outside) else ()


def doubts_of(model: Model) -> tuple[str, ...]:
    """Why these coefficients should not be bet on; empty if they may."""
    doubts = []
    if all(each.status == "prior_only" for each in model.coefficients):
        doubts.append("every coefficient is a donor's or a data sheet's")
    elif model.rows < _ROWS_MIN:
        doubts.append(f"learned from {model.rows} rows, fewer than {_ROWS_MIN}")
    if model.median_ape is not None and model.median_ape > _MEDIAN_APE_MAX:
        doubts.append(f"half of its predictions are off by more than {model.median_ape:.0%}")
    if sum(abs(each.value) for each in model.coefficients) <= 0.0:
        doubts.append("every coefficient is zero")
    return tuple(doubts)
