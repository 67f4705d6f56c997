"""The commands that ask a snapshot: ``show``, ``diff``, ``predict`` and ``plan``, and how their numbers are written.

A question goes from the arguments to the answer's text: the snapshot is loaded from a file or an address, the
configuration is chosen, and the client is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import tracefit
from collector.config import read_file, refuse_special, with_scheme
from collector.runtime import EXIT_FAILED, EXIT_OK, StartError
from exporters.questions import Question, answer_question, counted, duration, significant, tree_of
from exporters.snapshot_file import SNAPSHOT_NAME
from exporters.wording import REASONS, STATUS, STEP_TIME, coefficient, estimate, percent, spread
from tracefit import (
    Coefficient,
    Config,
    ConfigDiff,
    Diff,
    Model,
    Move,
    NoCoefficientsError,
    NotFoundError,
    Plan,
    Snapshot,
    Target,
    TypicalStep,
    minute,
    term_text,
)

from . import Report


def load_snapshot(source: str, token_file: Path | None) -> Snapshot:
    """A snapshot from a file or an address.

    Raises:
        StartError: the snapshot or the token cannot be read.
    """
    source = with_scheme(source)
    if "://" not in source:
        refuse_special(Path(source))
    try:
        return tracefit.load(source, token=read_token(token_file))
    except tracefit.LoadError as error:
        raise StartError(f"{error}{what_to_type(source, str(error))}") from None


def what_to_type(source: str, problem: str) -> str:
    """What to type in the place of what is no snapshot; empty where nobody knows."""
    path = Path(source)
    if "://" in source:
        hints = {"refused": "; a sidecar's pages are on port 9464", "(token=…)": ": give --token-file FILE"}
        return hints.get(problem.rpartition(" ")[2], "")
    if not (path.suffix or path.exists()):
        return "; an address is HOST:PORT, like localhost:9464"
    if path.is_dir() and (path / SNAPSHOT_NAME).is_file():
        return f"; did you mean '{path / SNAPSHOT_NAME}'?"
    if path.suffix == ".bin":
        return "; a checkpoint has its coefficients in the snapshot.json beside it"
    if path.is_file() and path.suffix != ".json":
        return f"; a recording becomes one: tracefit replay {path} -o snapshot.json"
    return ""


def read_token(path: Path | None) -> str | None:
    """The first word of a file, if one was named; StartError if it is no text."""
    try:
        return next(iter(read_file(path).decode("ascii").split()), "") if path is not None else None
    except UnicodeDecodeError:
        raise StartError(f"{path} is no token: it is not text") from None


def headline(config: Config) -> str:
    """Which configuration an answer is about."""
    return f"config {config.config_id}  {config.name}"


def ask(snapshot: Snapshot, question: Question, which: str = "", *, now: bool = False) -> Report:
    """The answer to ``predict`` or ``plan``.

    Failed without coefficients that may be used, and where not one request keeps the targets of a plan.

    Raises:
        BadInputError: a parameter makes no sense.
    """
    try:
        config = snapshot.config(which)
        answer = answer_question(config.now() if now else config, question, snapshot.as_of_unix_nano)
    except (NotFoundError, NoCoefficientsError) as error:
        return Report(EXIT_FAILED, notes=[refusal(error)])
    plan = answer.result if isinstance(answer.result, Plan) else None
    lines = [headline(config), *(f"  {name:<9} {text}" for name, text in answer.lines())]
    notes = [f"{why}: {text}" for why, text in answer.caveats()]
    if answer.question.query != question.query:
        known = answer.question.query["decode_context_tokens"]
        of_batch = "the usual one of such a batch" if known else "not known, and taken as 0"
        notes.insert(0, f"the context is {of_batch}; --context says another")
    fits = plan is None or plan.concurrency
    code = EXIT_OK if config.usable and fits else EXIT_FAILED
    return Report(code, [*lines, *(_curve_lines(plan) if plan is not None else ())], answer.document(), notes)


def refusal(error: Exception) -> str:
    """Why a question has no answer."""
    return f"error: {'--which: ' if isinstance(error, NotFoundError) else ''}{error}"


def _curve_lines(answer: Plan) -> Iterator[str]:
    """What requests see at 1, 2, 4, … in flight."""
    yield ""
    yield f"  {'in flight':>9} {'ITL':>10} {'TTFT':>10} {'requests/s':>11} {'tokens/s':>9}"
    for at in answer.curve:
        marks = "  <-" if at.concurrency == answer.concurrency else ""
        marks += "  outside of what was seen" if at.extrapolated else ""
        yield (
            f"  {at.concurrency:>9.0f} {duration(at.itl.us) if at.itl.us else '–':>10} {duration(at.ttft.us):>10} "
            f"{significant(at.requests_per_s):>11} {at.output_tokens_per_s:>9,.0f}{marks}"
        )


def diff(before: Snapshot, after: Snapshot) -> Report:
    """What changed; failed if the two have no configuration, or no coefficient, in common."""
    changes = before.diff(after)
    lines = _diff_lines(changes, {each.config_id: each.name for each in (*before.configs, *after.configs)})
    if any(config.moves for config in changes.configs):
        return Report(EXIT_OK, lines, tree_of(changes))
    known = "coefficient" if changes.configs else "configuration"
    return Report(EXIT_FAILED, lines, tree_of(changes), [f"error: the two snapshots have no {known} in common"])


def _diff_lines(changes: Diff, names: Mapping[str, str]) -> Iterator[str]:
    for config in changes.configs:
        yield from _changed_lines(config, names)
    for which, ids in (("first", changes.only_before), ("second", changes.only_after)):
        if ids:
            yield f"only in the {which}: {'; '.join(f'{names[each]} ({each})' for each in ids)}"


def _changed_lines(config: ConfigDiff, names: Mapping[str, str]) -> Iterator[str]:
    renamed = "" if config.before_id == config.after_id else f" -> {config.after_id}"
    yield f"config {config.before_id}{renamed}  {names[config.after_id]}"
    if not config.moves:
        yield "  nothing to compare: one of the two has no coefficients that the other has"
    target = ""
    for move in config.moves:
        if move.target != target:
            target = move.target
            yield f"  {target}"
        yield f"    {_move(move)}"
    if config.step is not None:
        yield f"  {_step(config.step)}"
    if config.term:
        yield f"  what moved: {term_text(config.term, config.added)}"
    elif config.step is not None and config.step.is_other:
        yield "  what moved: no single term explains it, or several do alike"


def _move(move: Move) -> str:
    distance = "error unknown" if move.standard_errors is None else f"{move.standard_errors:+.1f} standard errors"
    if move.moved:
        distance += "  MOVED"
    status = "" if move.status_before == move.status_after else f"  {move.status_before} -> {move.status_after}"
    before, after = (
        coefficient(each, move.unit, like=max(move.before, move.after)) for each in (move.before, move.after)
    )
    return f"{move.feature:<23} {before:>17} -> {after:<17} {distance}{status}"


def _step(step: TypicalStep) -> str:
    change = f" ({step.after_us / step.before_us - 1.0:+.1%})" if step.before_us > 0.0 else ""
    return (
        f"a typical step ({step.prefill_tokens:,.3g} prefill tokens, {step.requests:,.3g} requests, "
        f"{step.decode_context_tokens:,.0f} tokens of context): "
        f"{duration(step.before_us)} -> {duration(step.after_us)}{change}"
    )


def show(snapshot: Snapshot, which: str) -> Report:
    """Every configuration, or one; failed if none has coefficients that may be used."""
    try:
        configs = (snapshot.config(which),) if which else snapshot.configs
    except NotFoundError as error:
        return Report(EXIT_FAILED, notes=[refusal(error)])
    configurations = counted(len(snapshot.configs), "configuration")
    made = f"generation {snapshot.generation} of {minute(snapshot.created_unix_nano)}"
    lines = [f"{made}, {configurations}; ± is half of a 95 % interval"]
    lines += [line for config in configs for line in shown_lines(config, snapshot.as_of_unix_nano)]
    document = {"generation": snapshot.generation, "configs": [_shown_tree(each) for each in configs]}
    return Report(EXIT_OK if any(config.usable for config in configs) else EXIT_FAILED, lines, document)


def shown_lines(config: Config, now_unix_nano: int, only: str = "") -> Iterator[str]:
    """What is known of a configuration, for eyes: verdict, and coefficients of every target or of one."""
    yield ""
    engines = f", {counted(config.engines, 'engine')}" if config.engines else ""
    yield f"{headline(config)}  telemetry {config.telemetry}{engines}"
    limits = ", ".join(f"{name} {value:,}" for name, value in config.limits._asdict().items() if value is not None)
    if limits:
        yield f"  limits    {limits}"
    yield from _verdict_lines(config, now_unix_nano)
    for name, target in sorted(config.targets.items(), key=lambda item: (item[0] != STEP_TIME, item[0])):
        for model in published(target) if name == only or not only else ():
            yield from _target_lines(name, target, model)


def _verdict_lines(config: Config, now_unix_nano: int) -> Iterator[str]:
    """Usable or not and why, what changed of late, what its telemetry hides, and since when nobody sends."""
    verdict, step = config.verdict, config.targets.get(STEP_TIME)
    if verdict.usable and step is not None and step.mean_us is not None and verdict.error is not None:
        took = f"a step takes {duration(step.mean_us)} on average, the median error of predictions is"
        yield f"  verdict   {verdict.state}: {took} {percent(verdict.error)}"
    else:
        yield f"  verdict   {'; '.join((verdict.state, *verdict.reasons))}"
    if verdict.change is not None:
        yield f"  change    {verdict.change.text(now_unix_nano)}"
    for odd in verdict.outliers:
        yield f"  sibling   {odd.text}"
    for each in verdict.hidden:
        yield f"  hidden    {each}"
    silent_since = verdict.silent_since(now_unix_nano)
    if silent_since:
        yield f"  silent    since {minute(silent_since)}"


def published(target: Target) -> list[Model]:
    """The portable model, or whichever has coefficients."""
    listed = [model for model in target.models.values() if model.coefficients]
    return [model for model in listed if model.name == "portable"] or listed[:1]


def _target_lines(name: str, target: Target, model: Model) -> Iterator[str]:
    error = "" if model.median_ape is None else f", median error {percent(model.median_ape)}"
    usual = "" if target.mean_us is None else f", {duration(target.mean_us)} on average"
    yield f"  {name}  ({model.name}: {model.rows:,} rows{error}{usual})"
    for each in model.coefficients:
        yield f"    {_coefficient(each)}"
    if target.interval is not None:
        yield f"    8 of 10 differ from the prediction by {spread(*target.interval.pooled)}"


def _coefficient(each: Coefficient) -> str:
    why = REASONS.get(each.reason, each.reason) or STATUS.get(each.status, "") * (each.status != "identified")
    status = each.status.replace("_", " ") + f": {why}" * bool(why)
    return f"{each.name:<23} {estimate(each.value, each.stderr, each.unit):<24} {status}"


def _shown_tree(config: Config) -> dict[str, object]:
    return {
        "config_id": config.config_id,
        "config": dict(config.facts),
        "usable": config.usable,
        "reasons": list(config.reasons),
        "verdict": {"state": config.verdict.state, **tree_of(config.verdict)},
        "limits": tree_of(config.limits),
        "targets": {
            name: {
                "model": model.name,
                "rows": model.rows,
                "median_ape": model.median_ape,
                "coefficients": tree_of(model.coefficients),
            }
            for name, target in config.targets.items()
            for model in published(target)
        },
    }
