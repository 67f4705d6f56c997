"""What every file for another program is made of: one configuration as the client sees it, and the requests it is for.

The programs have no place for all that was learned. Each file says in a comment what is lost in it, and is refused
rather than filled with guesses.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from exporters.charts import unit_text
from exporters.client_view import client_config, index_of
from exporters.labels import printable
from online import ConfigSnapshot, Snapshot
from tracefit import BEYOND_SEEN_BATCHES, Config, NotFoundError, TracefitError

COMMENT_CHARS = 400
PREDICTED = ("step_time", "api_queueing", "post_decode", "first_response")
"""Targets that add up to what a request sees."""


class ExportError(ValueError):
    """The configuration cannot be exported; the text says what is missing and which option supplies it."""


class Assumptions(NamedTuple):
    """What the command line says of the requests and the engine, where the snapshot does not or is to be overruled."""

    prompt_tokens: float | None = None
    output_tokens: float | None = None
    prefix_hit: float = 0.0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None


class Source(NamedTuple):
    """Where a file comes from: ``client`` predicts, ``heading`` says which configuration of which snapshot this is."""

    client: Config
    heading: tuple[str, ...]


def choose_config(snapshot: Snapshot, which: str) -> ConfigSnapshot:
    """The configuration that is meant, as ``find_config`` of the client understands it.

    Raises:
        ExportError: there is none like that, or several that are alive.
    """
    try:
        return snapshot.configs[index_of(snapshot.configs, which)]
    except NotFoundError as error:
        raise ExportError(f"--which: {error}") from None


def source_of(snapshot: Snapshot, config: ConfigSnapshot, assumptions: Assumptions) -> Source:
    """The configuration as the client sees it, under the assumptions.

    Raises:
        ExportError: it has no coefficients, or a limit makes no sense.
    """
    try:
        client = client_config(config).assuming(
            max_num_seqs=assumptions.max_num_seqs,
            max_num_batched_tokens=assumptions.max_num_batched_tokens,
            kv_tokens=assumptions.kv_tokens,
        )
        client.coefficients()
    except TracefitError as error:
        raise ExportError(str(error)) from None
    heading = [
        f"tracefit {snapshot.tracefit_version}, snapshot generation {snapshot.generation}, config {config.config_id}",
        *(f"{key}: {value}" for key, value in sorted(config.config.items())),
        *(f"not usable yet: {reason}" for reason in client.reasons),
        *(f"{each.name}: {each.reason}" for each in client.coefficients() if each.reason),
        *warnings_of(config),
    ]
    return Source(client, tuple(heading))


def requests_of(config: ConfigSnapshot, assumptions: Assumptions) -> tuple[float, float]:
    """Mean prompt and output tokens: as given, else as learned.

    Raises:
        ExportError: nobody said.
    """
    prompt = assumptions.prompt_tokens or _mean_of(config, "api_queueing", "prompt_tokens")
    output = assumptions.output_tokens or _mean_of(config, "post_decode", "output_tokens")
    if prompt is None or output is None:
        missing = "--prompt" if prompt is None else "--output"
        raise ExportError(f"{missing}: the snapshot does not know the mean request; say how many tokens it has")
    return prompt, output


def warnings_of(config: ConfigSnapshot) -> tuple[str, ...]:
    """What whoever uses a file of it has to know, whatever the program."""
    return (BEYOND_SEEN_BATCHES,) if config.mixture_of_experts else ()


def comments(*lines: str) -> str:
    """Lines for the head of a file."""
    return "".join(f"# {printable(line, COMMENT_CHARS)}\n" for line in lines)


def _mean_of(config: ConfigSnapshot, target: str, feature: str) -> float | None:
    known = config.targets.get(target)
    model = known.models.get("portable") if known is not None else None
    for each in model.features if model is not None else ():
        if each.name == feature and each.mean is not None and math.isfinite(each.mean) and each.mean >= 1.0:
            return each.mean
    return None


def doubtful_coefficients(config: ConfigSnapshot, targets: Collection[str] = PREDICTED) -> tuple[str, ...]:
    """Each coefficient of ``portable`` whose status is not ``identified``, with that and its standard error."""
    doubtful = []
    for target in targets:
        learned = config.targets.get(target)
        model = None if learned is None else learned.models.get("portable")
        for feature in () if model is None else model.features:
            if feature.status != "identified":
                error = "" if feature.stderr is None else f" ± {feature.stderr:.2g}"
                value = f"{feature.coefficient:.4g}{error} {unit_text(feature.unit)}"
                reason = f", {feature.reason}" if feature.reason else ""
                said = f"{target} {feature.name}: {feature.status}, {value}{reason}"
                doubtful.append(printable(said, COMMENT_CHARS))
    return tuple(doubtful)
