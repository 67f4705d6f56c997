"""``tracefit plan``: how many requests fit the targets, what limits them, and the curve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from collector.runtime import EXIT_FAILED, EXIT_OK, PrintLine
from tracefit import Plan, Snapshot, TracefitError

from .answers import as_json, caveats, chosen, duration, headline
from .predict import answer_tree, load_lines

_LIMITS = {
    "itl": "compute: one more request breaks the ITL target",
    "ttft": "compute: one more request breaks the TTFT target",
    "token_budget": "token budget: prefills fill every step",
    "max_num_seqs": "max_num_seqs: the engine runs no more at once",
    "kv_capacity": "KV cache: its blocks hold no more",
    "none": "nothing that is known; give --max-num-seqs or --kv-tokens",
}


class Targets(NamedTuple):
    """What is asked; the fields are those of :meth:`tracefit.Config.plan`."""

    prompt_tokens: float
    output_tokens: float
    itl_ms: float | None = None
    ttft_ms: float | None = None
    rate: float | None = None
    prefix_hit: float = 0.0
    safe: bool = False


class Assumed(NamedTuple):
    """Limits that the telemetry did not tell; see :meth:`tracefit.Config.assuming`."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None


def plan(
    snapshot: Snapshot,
    targets: Targets,
    assumed: Assumed,
    *,
    config_id: str | None,
    in_json: bool,
    say: PrintLine,
    note: PrintLine,
) -> int:
    """Print the answer; failed without coefficients that may be used, and where not one request keeps the targets."""
    try:
        config = chosen(snapshot, config_id).assuming(**assumed._asdict())
        answer = config.plan(**targets._asdict())
    except TracefitError as error:
        note(f"error: {error}")
        return EXIT_FAILED
    if in_json:
        say(as_json({"config_id": config.config_id, "asked": targets._asdict(), **plan_tree(answer)}))
    else:
        say(headline(config))
        for line in _lines(answer, targets):
            say(line)
    for caveat in caveats(config, answer.at.extrapolated):
        note(caveat)
    return EXIT_OK if config.usable and answer.concurrency else EXIT_FAILED


def plan_tree(answer: Plan) -> dict[str, object]:
    """The plan as a tree for ``--json``."""
    return {
        **answer._asdict(),
        "at": answer_tree(answer.at),
        "curve": [answer_tree(each) for each in answer.curve],
        "at_rate": None if answer.at_rate is None else answer_tree(answer.at_rate),
    }


def _lines(answer: Plan, targets: Targets) -> Iterator[str]:
    if answer.concurrency:
        yield f"  fits      {answer.concurrency} requests in flight{' on the safe side' if targets.safe else ''}"
    else:
        yield "  fits      not even one request keeps the targets; alone it sees"
    yield f"  because   {_LIMITS[answer.limit]}"
    for line in load_lines(answer.at):
        yield f"  {line}"
    if targets.rate is not None:
        yield f"  for {targets.rate:g} requests/s: {_rate_verdict(answer)}"
    yield ""
    yield f"  {'in flight':>9} {'ITL':>10} {'TTFT':>10} {'requests/s':>11} {'tokens/s':>9}"
    for point in answer.curve:
        marks = "  <-" if point.concurrency == answer.concurrency else ""
        marks += "  outside of what was seen" if point.extrapolated else ""
        yield (
            f"  {point.concurrency:>9.0f} {duration(point.itl.us):>10} {duration(point.ttft.us):>10} "
            f"{point.requests_per_s:>11.3g} {point.output_tokens_per_s:>9,.0f}{marks}"
        )


def _rate_verdict(answer: Plan) -> str:
    if answer.replicas is None:
        return "cannot be said: no load keeps the targets"
    engines = "one engine is enough" if answer.replicas == 1 else f"{answer.replicas} engines are needed"
    if answer.at_rate is None:
        return engines
    seen = answer.at_rate
    return (
        f"{engines}; on one, {seen.concurrency:.3g} in flight, ITL {duration(seen.itl.us)}, "
        f"TTFT {duration(seen.ttft.us)}"
    )
