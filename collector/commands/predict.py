"""``tracefit predict``: what one step costs, or what requests see at a load."""

from __future__ import annotations

from collections.abc import Iterator

from collector.runtime import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PrintLine
from exporters.what_if import Load, QuestionError, Step, as_json, predict_document, predicted
from tracefit import Config, Prediction, RequestEstimate, Snapshot, TracefitError

from .answers import caveats, counted, headline, refusal, with_band

_NO_FACTOR = 1e-9


def predict(
    snapshot: Snapshot,
    question: Step | Load,
    *,
    which: str,
    in_json: bool,
    say: PrintLine,
    note: PrintLine,
    now: bool = False,
) -> int:
    """Print the answer; failed without coefficients that may be used."""
    try:
        config = snapshot.config(which)
        config = config.now() if now else config
        answer = predicted(config, question)
    except (TracefitError, QuestionError) as error:
        note(refusal(error))
        return EXIT_USAGE if isinstance(error, QuestionError) else EXIT_FAILED
    if in_json:
        say(as_json(predict_document(config, question, answer)))
    else:
        say(headline(config))
        for line in _step_lines(config, question, answer) if isinstance(question, Step) else load_lines(answer):
            say(f"  {line}")
        if now:
            say(f"  {_level_line(config)}")
    for caveat in caveats(config, answer.extrapolated):
        note(caveat)
    return EXIT_OK if config.usable else EXIT_FAILED


def _step_lines(config: Config, step: Step, answer: Prediction | RequestEstimate) -> Iterator[str]:
    assert isinstance(answer, Prediction)  # noqa: S101 - a step was asked for
    yield f"step      {_work(step)}"
    yield f"takes     {with_band(answer)}"
    work = {"intercept": 1.0, **step._asdict()}
    terms = {each.name: each.value * work[each.name] for each in config.coefficients()}
    total = sum(terms.values())
    if total > 0.0:
        factor = answer.us / total
        shares = ", ".join(f"{name} {value / total:.0%}" for name, value in terms.items())
        yield f"of which  {shares}" + (f"; times {factor:.3f} for this shape" if abs(factor - 1.0) > _NO_FACTOR else "")


def _level_line(config: Config) -> str:
    """What the last steps do to the answer, and how old that is."""
    if config.level_age_s is None:
        return "level     none: nothing was learned of the last steps"
    if config.level is None:
        return f"level     not used: it is {config.level_age_s:,.0f} s old"
    decode, prefill = config.level
    return f"level     ×{decode:.3f} without prefill, ×{prefill:.3f} with; {config.level_age_s:.1f} s old"


def _work(step: Step) -> str:
    return (
        f"{step.prefill_tokens:,.0f} prefill tokens, {step.requests:,.3g} requests, "
        f"{step.decode_context_tokens:,.0f} tokens of decode context"
    )


def load_lines(answer: Prediction | RequestEstimate) -> Iterator[str]:
    """What requests see, as `plan` prints it too."""
    assert isinstance(answer, RequestEstimate)  # noqa: S101 - a load was asked for
    waiting = f", {answer.concurrency - answer.running:.3g} wait" if answer.concurrency > answer.running else ""
    yield f"in flight {counted(answer.concurrency, 'request')} ({answer.running:.4g} run{waiting})"
    yield f"TTFT      {with_band(answer.ttft)}"
    yield f"ITL       {with_band(answer.itl)}"
    yield f"E2E       {with_band(answer.e2e)}"
    yield f"rate      {answer.requests_per_s:.3g} requests/s, {answer.output_tokens_per_s:,.0f} output tokens/s"
    if answer.prefill_bound:
        yield "limit     prefills fill every step: more requests only wait longer"
