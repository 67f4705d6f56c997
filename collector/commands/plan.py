"""``tracefit plan``: how many requests fit the targets, what limits them, and the curve."""

from __future__ import annotations

from collections.abc import Iterator

from collector.runtime import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PrintLine
from exporters.what_if import LIMIT_WORDS, QuestionError, Sizing, Targets, as_json, plan_document, planned
from tracefit import Plan, Snapshot, TracefitError

from .answers import caveats, counted, duration, headline, refusal
from .predict import load_lines


def plan(snapshot: Snapshot, question: Sizing, *, which: str, in_json: bool, say: PrintLine, note: PrintLine) -> int:
    """Print the answer; failed without coefficients that may be used, and where not one request keeps the targets."""
    try:
        config = snapshot.config(which)
        answer = planned(config, question)
    except (TracefitError, QuestionError) as error:
        note(refusal(error))
        return EXIT_USAGE if isinstance(error, QuestionError) else EXIT_FAILED
    if in_json:
        say(as_json(plan_document(config, question, answer)))
    else:
        say(headline(config))
        for line in _lines(answer, question.targets):
            say(line)
    for caveat in caveats(config, answer.at.extrapolated):
        note(caveat)
    return EXIT_OK if config.usable and answer.concurrency else EXIT_FAILED


def _lines(answer: Plan, targets: Targets) -> Iterator[str]:
    if answer.concurrency:
        side = " on the safe side" if targets.safe else ""
        yield f"  fits      {counted(answer.concurrency, 'request')} in flight{side}"
    else:
        yield "  fits      not even one request keeps the targets; alone it sees"
    yield f"  because   {LIMIT_WORDS[answer.limit]}"
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
