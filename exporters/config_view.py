"""A configuration as the page shows it: its verdict in one line, three figures, its formula, coefficients and pictures.

Whether it may be used, what changed and who is silent is read from the verdict of the client, and nowhere else. The
table of all configurations begins with those in trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from exporters.blis import BlisError, blis_coefficients
from exporters.charts import Z_95, axis_limit, courses, scatter, step_shares, whisker
from exporters.questions import duration
from exporters.what_if import LoadView
from exporters.wording import (
    FEATURE_NAMES,
    REASONS,
    STATUS,
    TARGET_MEANINGS,
    TARGET_NAMES,
    Advice,
    advice_for,
    age,
    coefficient,
    count,
    factor,
    percent,
)
from online import (
    ConfigSnapshot,
    FeatureSnapshot,
    HistoryView,
    ModelSnapshot,
    ReplicaSnapshot,
    Snapshot,
    TargetSnapshot,
)
from tracefit import SpeedChange, Verdict, term_text

View = dict[str, Any]
"""What a template lays out."""

STEP_TIME = "step_time"
MAX_REPLICAS = 16
MAX_ENGINES = 32
_MERGED = "merged"
_TITLE_FACTS = {"gpu": "", "tensor_parallel_size": "TP ", "quantization": "", "vllm_version": "vLLM "}
_PHASES = {"decode": "steps without prefill", "prefill": "steps with prefill"}


class Judged(NamedTuple):
    """A configuration with the verdict on it, its load, and what tells it from others."""

    config: ConfigSnapshot
    load: LoadView | None
    verdict: Verdict
    apart: tuple[str, ...]


def rank(judged: Judged, now: int) -> tuple[bool, bool, int]:
    """To sort by: configurations in trouble first, silent ones last, else by rows."""
    verdict = judged.verdict
    return not verdict.problems(now), bool(verdict.silent_since(now)), -verdict.rows


class PageView(NamedTuple):
    """What all configurations of a page share: the clock, when this process began, its port, and histories by id."""

    now_unix_nano: int
    started_unix_nano: int
    otlp_port: int
    history_of: Callable[[str], HistoryView | None]


def config_view(judged: Judged, page: PageView, given: set[Advice]) -> View:
    """One configuration in detail; of the advice, what was not ``given`` above."""
    config, history = judged.config, page.history_of(judged.config.config_id)
    step = config.targets.get(STEP_TIME)
    model = None if step is None else _shown_model(step)
    order = [name for name in TARGET_NAMES if name in config.targets]
    others = [name for name in (*order, *sorted(config.targets.keys() - order)) if name != STEP_TIME]
    views = (_target_view(name, config.targets[name], config) for name in others)
    advice = [each.for_port(page.otlp_port) for each in advice_for(config)]
    new = [each for each in advice if each not in given]
    given.update(advice)
    over_time = [] if model is None else courses(model, history, page.started_unix_nano)
    return {
        "id": config.config_id,
        "title": title(config),
        "facts": facts(judged) or "no facts known",
        "bar": list(_bar(judged, page.now_unix_nano)),
        "figures": _figures(judged.verdict, page.now_unix_nano),
        "equation": None if model is None else _equation(model),
        "quarantined": config.quarantined,
        "reasons": judged.verdict.reasons if not config.quarantined else (),
        "hidden": judged.verdict.hidden,
        "telemetry": config.telemetry,
        "emitters": _emitters(config),
        "advice": [] if config.quarantined else new,
        "step": None if step is None else _target_view(STEP_TIME, step, config),
        "others": [view for view in views if view is not None],
        "shares": None if step is None or model is None else step_shares(step, model),
        "courses": bool(over_time),
        "pictures": [figure for figure in (scatter(history), *over_time) if figure is not None],
        "nothing_learned": not config.targets and not config.quarantined,
        "blis_error": _blis_error(config),
        "known": sorted((str(key), str(value)) for key, value in config.config.items()),
        "engines": config.engines[:MAX_ENGINES],
    }


def _bar(judged: Judged, now: int) -> Iterator[tuple[str, str]]:
    """The verdict in one line: words with their tone, ``ok``, ``fair``, ``bad`` or nothing."""
    verdict, load = judged.verdict, judged.load
    silent = verdict.silent_since(now)
    yield verdict.state, _tone(verdict)
    step = judged.config.targets.get(STEP_TIME)
    if step is not None and step.mean_us is not None:
        yield f"steps {duration(step.mean_us)}", ""
    if load is not None and load.mix is not None and load.mix.itl_us is not None:
        said = "" if load.seen is None else f"{duration(load.seen.itl.us, like=load.mix.itl_us)} predicted, "
        yield f"ITL {said}{duration(load.mix.itl_us)} observed", ""
    for words in _fitting(load):
        yield words, ""
    if silent:
        yield ("replaced" if verdict.replaced else "silent") + f", last heard {age((now - silent) / 1e9)} ago", "fair"
    elif verdict.last_row_unix_nano:
        yield f"last row {age((now - verdict.last_row_unix_nano) / 1e9)} ago", ""
    change = verdict.change
    if change is not None and change.is_news(now):
        yield change.text(now), "fair"
    elif judged.config.targets:
        yield "no change of speed today", ""


def _tone(verdict: Verdict) -> str:
    return "bad" if verdict.quarantined or verdict.doubts else "ok" if verdict.usable else "fair"


def _fitting(load: LoadView | None) -> Iterator[str]:
    if load is not None and load.fits:
        largest = load.config.verdict.seen.get("requests", (0.0, 0.0))[1]
        for fit in load.fits:
            fits = f"{fit.concurrency} fit" if fit.concurrency is not None else "more fit than were seen at"
            yield f"{fits} ITL {fit.itl_ms:g} ms (largest batch seen {count(largest)})"


def _figures(verdict: Verdict, now: int) -> list[tuple[str, str]]:
    """The three figures: how far off, from how much, and what changed."""
    if verdict.error is None and not verdict.rows:
        return []
    error = "not known yet" if verdict.error is None else f"{percent(verdict.error)} in the median"
    return [
        ("error of predictions", error),
        ("rows learned from", count(verdict.rows)),
        ("last change of speed", _change_words(verdict.change, now)),
    ]


def _change_words(change: SpeedChange | None, now: int) -> str:
    if change is None:
        return "none"
    term = term_text(change.term, change.added)
    return f"×{factor(change.factor)}, {age((now - change.since_unix_nano) / 1e9)} ago{term and f': {term}'}"


def title(config: ConfigSnapshot) -> str:
    """What people call it: the model, or who sends."""
    model = config.config.get("model")
    if model:
        return str(model)
    return f"unknown model at {config.engines[0].instance}" if config.engines else "unknown model"


def facts(judged: Judged) -> str:
    """The few facts that tell configurations apart."""
    known = ((before, judged.config.config.get(key)) for key, before in _TITLE_FACTS.items())
    return " · ".join((*(f"{before}{value}" for before, value in known if value not in {None, ""}), *judged.apart))


def _emitters(config: ConfigSnapshot) -> str:
    """Who sends: engines and their scheduling, or the engines whose states were merged."""
    step = config.targets.get(STEP_TIME)
    if config.telemetry == _MERGED and step is not None and step.replicas:
        return f"{len(step.replicas)} engines merged"
    modes = ", ".join(sorted({engine.scheduling for engine in config.engines}))
    engines = f"{len(config.engines)} {'engine' if len(config.engines) == 1 else 'engines'}"
    return f"{engines}, {modes} scheduling" if modes else engines


def overview_view(snapshot: Snapshot, judged: Sequence[Judged], chosen: Sequence[Judged], now: int) -> View | None:
    """The table of configurations; None of a single one."""
    if len(snapshot.configs) == 1:
        return None
    current = chosen[0].config.config_id if chosen else ""

    rows = []
    for each in judged:
        step, verdict = each.config.targets.get(STEP_TIME), each.verdict
        last = verdict.last_row_unix_nano or verdict.last_heard_unix_nano
        fits = [
            fit.concurrency for fit in (each.load.fits if each.load is not None else ()) if fit.concurrency is not None
        ]
        rows.append(
            {
                "id": each.config.config_id,
                "title": title(each.config),
                "facts": facts(each),
                "state": "silent" if verdict.silent_since(now) else verdict.state,
                "tone": "fair" if verdict.silent_since(now) else _tone(verdict),
                "step": "–" if step is None or step.mean_us is None else duration(step.mean_us),
                "error": "–" if verdict.error is None else percent(verdict.error),
                "change": _change_words(verdict.change, now),
                "last": age((now - last) / 1e9) if last else "–",
                "fits": fits[0] if fits else "–",
                "is_current": each.config.config_id == current,
            }
        )
    return {"rows": rows, "hidden": len(snapshot.configs) - len(rows), "all": len(snapshot.configs) if chosen else 0}


# ----------------------------------------------------------------- coefficients


def _shown_model(target: TargetSnapshot) -> ModelSnapshot | None:
    return target.models.get("portable") or target.models.get(target.champion)


def _equation(model: ModelSnapshot) -> list[tuple[str, str]]:
    """The model as a sentence that can be read aloud: values, and what each is per."""
    return [
        (
            coefficient(feature.coefficient, feature.unit).split("/")[0],
            "" if feature.name == "intercept" else FEATURE_NAMES.get(feature.name, feature.name),
        )
        for feature in model.features
    ]


def _target_view(name: str, target: TargetSnapshot, config: ConfigSnapshot) -> View | None:
    model = _shown_model(target)
    if model is None:
        return None
    limit = axis_limit(model)
    title = TARGET_NAMES.get(name, name)
    return {
        "key": f"target-{config.config_id}-{name}",
        "name": title,
        "meaning": TARGET_MEANINGS.get(name, ""),
        "vector": target.vector,
        "is_step": name == STEP_TIME,
        "mean_us": target.mean_us,
        "in_flight": target.in_flight,
        "error": target.prediction_error,
        "equation": _equation(model),
        "caption": f"Coefficients of {title}, portable set, {config.config_id}",
        "limit": limit,
        "coefficients": [_coefficient_view(feature, limit) for feature in model.features],
        "more": list(_more_figures(target, model)),
        "replicas": [replica_view(each) for each in target.replicas[:MAX_REPLICAS]],
        "replicas_all": len(target.replicas),
        "replicas_differing": sum(each.differs for each in target.replicas),
        "told_apart_by": config.told_apart_by,
    }


def _coefficient_view(feature: FeatureSnapshot, limit: float) -> View:
    """A row of the table; value and half of its 95 % interval in one unit."""
    value, stderr = feature.coefficient, feature.stderr
    half = "–"
    if stderr is not None:
        half = coefficient(Z_95 * stderr, feature.unit, like=value or None, digits=2).split("/")[0]
    why = REASONS[feature.reason] if feature.reason is not None else STATUS.get(feature.status, "")
    return {
        "name": feature.name,
        "value": coefficient(value, feature.unit),
        "half": half,
        "whisker": whisker(None if stderr is None else stderr / value, limit) if value else None,
        "status": feature.status,
        "why": "" if feature.status == "identified" and feature.reason is None else why,
    }


def _more_figures(target: TargetSnapshot, model: ModelSnapshot) -> Iterator[tuple[str, str]]:
    """What the verdict does not show: other errors, the last steps' level, and the interval."""
    yield "effective rows", count(model.effective_rows)
    if model.error is not None:
        yield (
            "error of the coefficients alone",
            f"{percent(model.error.median_ape)}, p90 {percent(model.error.p90_ape)}",
        )
    if target.shape_factors and model.shaped_error is not None:
        yield "error with shape factors", percent(model.shaped_error.median_ape)
    if model.prediction_error is not None:
        yield "error with the level of the last steps", percent(model.prediction_error.median_ape)
    for phase, level in target.level.items():
        yield f"level, {_PHASES.get(phase, phase)}", f"×{factor(level.factor)}"
    if target.correction is not None and target.correction.active:
        yield f"correction ({target.correction.learner})", f"×{factor(target.correction.factor)} on the last row"
    if target.interval is not None:
        low, high = (percent(abs(ratio - 1.0)) for ratio in (target.interval.p10, target.interval.p90))
        yield "8 of 10 take, against the prediction", f"−{low} to +{high}"
    if target.drift is not None:
        yield "changes of speed", count(target.drift.count)


def replica_view(replica: ReplicaSnapshot) -> View:
    """An engine against its siblings, with the 95 % interval of the ratio."""
    ratio = "–" if replica.ratio is None else f"×{replica.ratio:.3f}"
    if replica.ratio is not None and replica.stderr is not None:
        ratio += f" ± {Z_95 * replica.stderr:.3f}"
    return {
        "engine": replica.engine or "unknown",
        "differs": replica.differs,
        "ratio": ratio,
        "rows": replica.rows,
        "term": term_text(replica.term, replica.added),
    }


def _blis_error(config: ConfigSnapshot) -> str:
    """Why BLIS cannot have a file of it; empty where it can."""
    try:
        blis_coefficients(config)
    except BlisError as error:
        return str(error)
    return ""
