"""Configurations as HTML: all of them in one table, and each with its coefficients, its errors and what would help.

Engines of a merged state stand side by side, and so do models: those with coefficients compete, those that only predict
stand apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exporters.advice import STATUS, Advice, advice_for
from exporters.blis import BlisError, blis_coefficients
from exporters.charts import Z_95, nice_limit, whisker
from exporters.step_charts import Seen, step_charts, step_shares
from exporters.wording import (
    FEATURE_NAMES,
    REASONS,
    TARGET_NAMES,
    coefficient,
    count,
    duration,
    escape,
    factor,
    percent,
)
from online import ConfigSnapshot, FeatureSnapshot, ModelSnapshot, ReplicaSnapshot, TargetSnapshot
from tracefit import told_apart

MAX_REPLICAS = 16


def replicas_table(target: TargetSnapshot, told_apart_by: Sequence[str] = ()) -> str:
    """The engines furthest from their siblings, and how many differ; empty where nothing was merged.

    ``told_apart_by``: facts that would make those of another speed a configuration of their own.
    """
    replicas = target.replicas
    if not replicas:
        return ""
    differing = sum(replica.differs for replica in replicas)
    verdict = f"{differing} differ by more than their errors" if differing else "none differs from the others"
    rows = "".join(map(_replica_row, replicas[:MAX_REPLICAS]))
    return (
        f"{_kinds(told_apart_by)}"
        f'<table class="models"><caption>Merged from {len(replicas)} engines: {verdict}</caption>'
        '<thead><tr><th scope="col">engine</th><th scope="col" class="num">time ÷ the others’</th>'
        f'<th scope="col" class="num">rows</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _kinds(told_apart_by: Sequence[str]) -> str:
    if not told_apart_by:
        return ""
    facts = " ".join(f"<code>{escape(fact)}</code>" for fact in told_apart_by)
    return f'<p class="remedy">Two kinds of machine under one identity would be told apart by {facts}.</p>'


def _replica_row(replica: ReplicaSnapshot) -> str:
    mark = ' <span class="champion">differs</span>' if replica.differs else ""
    ratio = "–" if replica.ratio is None else f"×{replica.ratio:.3f}"
    if replica.ratio is not None and replica.stderr is not None:
        ratio += f" ± {replica.stderr:.3f}"
    name = escape(replica.engine or "unknown")
    return (
        f'<tr><th scope="row">{name}{mark}</th><td class="num">{ratio}</td>'
        f'<td class="num">{count(replica.rows)}</td></tr>'
    )


def models_in_competition(target: TargetSnapshot) -> str:
    """Models with coefficients in competition; those that only predict apart: they see other rows."""
    listed = {name: model for name, model in target.models.items() if model.features}
    others = {name: model for name, model in target.models.items() if not model.features}
    competing = _model_table("Models in competition", listed, target.champion) if len(listed) > 1 else ""
    predicting = "Models that only predict, over the rows that they see: not in competition"
    return competing + (_model_table(predicting, others, target.champion) if others else "")


def _model_table(caption: str, models: Mapping[str, ModelSnapshot], champion: str) -> str:
    rows = ""
    for name, model in sorted(models.items()):
        best = ' <span class="champion">champion</span>' if name == champion else ""
        errors = (
            None if model.error is None else model.error.median_ape,
            None if model.error is None else model.error.p90_ape,
        )
        cells = "".join(f'<td class="num">{"–" if ratio is None else percent(ratio)}</td>' for ratio in errors)
        cells += f'<td class="num">{count(model.rows)}</td><td class="num">{len(model.features) or "–"}</td>'
        rows += f'<tr><th scope="row">{escape(name)}{best}</th>{cells}</tr>'
    heads = "".join(f'<th scope="col" class="num">{h}</th>' for h in ("median error", "p90", "rows", "features"))
    return (
        f'<table class="models"><caption>{caption}</caption>'
        f'<thead><tr><th scope="col">model</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    )


MAX_SHAPES = 16
MAX_AXIS = 0.5
"""Beyond half of the coefficient an error bar or a live value is drawn at the edge; the numbers stand beside."""

_NOTHING_LEARNED = (
    "<p>Its engines are heard of, and nothing could be learned from them yet. What they wait for stands below under "
    '“Not learned from yet”; what was left out and why, under <a href="#accounting">Queue and losses</a>.</p>'
)

PHASE_NAMES = {"decode": "steps without prefill", "prefill": "steps with prefill"}
_TITLE_FACTS = ("gpu", "tensor_parallel_size", "quantization", "vllm_version")
_FACT_WORDS = {"tensor_parallel_size": "TP ", "vllm_version": "vLLM "}


def config_title(config: ConfigSnapshot) -> str:
    """What people call it: the model, or who sends."""
    model = config.config.get("model")
    if model:
        return str(model)
    return f"unknown model at {config.engines[0].instance}" if config.engines else "unknown model"


def config_facts(config: ConfigSnapshot) -> str:
    """The few facts that tell configurations of one model apart."""
    known = ((key, config.config.get(key)) for key in _TITLE_FACTS)
    return " · ".join(f"{_FACT_WORDS.get(key, '')}{value}" for key, value in known if value not in {None, ""})


def config_section(seen: Seen, apart: Sequence[str] = ()) -> str:
    """Everything about one configuration; ``apart`` tells it from others, and since when it is silent."""
    config = seen.config
    name = escape(config.config_id)
    facts = escape(" · ".join(filter(None, (config_facts(config), *apart)))) or "no facts known"
    parts = [
        f'<section class="config" id="config-{name}" aria-labelledby="title-{name} facts-{name}" data-live>',
        f'<header><h2 id="title-{name}">{escape(config_title(config))}</h2>',
        f'<p class="facts" id="facts-{name}">{facts} <code>{name}</code></p>',
        _links(config),
        "</header>",
        *map(_doubt, config.doubts),
        _advice(config, seen.otlp_port) if not config.quarantined else _quarantined(config.quarantined),
    ]
    if not config.targets and not config.quarantined:
        parts.append(_NOTHING_LEARNED)
    step = config.targets.get("step_time")
    if step is not None:
        parts.append(_target("step_time", step, seen))
    order = list(TARGET_NAMES)
    others = sorted(set(config.targets) - {"step_time"}, key=lambda name: _place(order, name))
    parts += [_target(name, config.targets[name], seen) for name in others]
    parts.append(_identity(config))
    parts.append("</section>")
    return "".join(parts)


def _place(order: list[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def _links(config: ConfigSnapshot) -> str:
    """Where else this configuration is, and for BLIS why it cannot be had, where that is so."""
    name = escape(config.config_id)
    links = (
        f'<nav class="links" aria-label="Links of configuration {name}"><a href="/?config={name}">permalink</a> '
        f'<a href="/snapshot/{name}">JSON</a>'
    )
    try:
        blis_coefficients(config)
    except BlisError as error:
        return f'{links}</nav><p class="quiet">No file for BLIS: {escape(error)}</p>'
    return (
        f'{links} <a href="/snapshot/{name}/blis.yaml">BLIS file</a> '
        f'<a href="/snapshot/{name}/blis.yaml?format=flags">BLIS flags</a></nav>'
    )


def _doubt(clause: str) -> str:
    return f'<div class="quality poor"><p><strong>not usable</strong> {escape(clause)}</p></div>'


def _quarantined(reason: str) -> str:
    return (
        '<div class="quality poor"><p><strong>put aside</strong> Its learner failed, and what it had learned is '
        f"forgotten: {escape(reason)}. A restart of the sidecar begins anew with it; please report the log.</p></div>"
    )


def _advice(config: ConfigSnapshot, otlp_port: int) -> str:
    first, *others = (advice.for_port(otlp_port) for advice in advice_for(config))
    engines = ", ".join(sorted({engine.scheduling for engine in config.engines}))
    plural = "engine" if len(config.engines) == 1 else "engines"
    emitters = f"{len(config.engines)} {plural}" + (f", {escape(engines)} scheduling" if engines else "")
    heads = [
        f'<strong>{escape(config.telemetry)}</strong> {escape(first.meaning)} <span class="quiet">{emitters}</span>'
    ]
    heads += [escape(other.meaning) for other in others]
    return "".join(
        f'<div class="quality {advice.level}"><p>{head}</p>{_remedy(advice)}</div>'
        for advice, head in zip((first, *others), heads, strict=True)
    )


def _remedy(advice: Advice) -> str:
    if not advice.remedy:
        return ""
    flags = " ".join(f"<code>{escape(flag)}</code>" for flag in advice.flags)
    return f'<p class="remedy">{escape(advice.remedy)} {flags}</p>'


def _target(name: str, target: TargetSnapshot, seen: Seen) -> str:
    model = target.models.get("portable") or target.models.get(target.champion)
    if model is None:
        return ""
    title = escape(TARGET_NAMES.get(name, name))
    pictures = (step_shares(target, model), step_charts(model, seen)) if name == "step_time" else ("", "")
    config_id = seen.config.config_id
    body = (
        f'<p class="equation">{_equation(name, model)}</p>{_numbers(target)}'
        f"{_coefficients(name, model, config_id)}{''.join(pictures)}{_shape_factors(target, config_id)}"
        f"{replicas_table(target, seen.config.told_apart_by)}{models_in_competition(target)}"
    )
    summary = f'<h3>{title}</h3><span class="vector">{escape(target.vector)}</span>{_headline(target)}'
    key = f"target-{escape(config_id)}-{escape(name)}"
    opened = " open" if name == "step_time" else ""
    return f'<details class="target" id="{key}"{opened}><summary>{summary}</summary>{body}</details>'


def _headline(target: TargetSnapshot) -> str:
    words = []
    if target.mean_us is not None:
        words.append(f"mean over all {duration(target.mean_us)}")
    if target.in_flight is not None:
        words.append(f"{duration(target.in_flight.us_per_request)} more with each request in flight")
    error = target.prediction_error
    if error is not None:
        words.append(f"error {percent(error.median_ape)}")
    return f'<span class="headline">{" · ".join(words)}</span>'


def _equation(name: str, model: ModelSnapshot) -> str:
    """The model as a sentence that can be read aloud."""
    terms = []
    for feature in model.features:
        value = f"<b>{escape(coefficient(feature.coefficient, feature.unit).split('/')[0])}</b>"
        if feature.name == "intercept":
            terms.append(value)
        else:
            terms.append(f"{value} per {escape(FEATURE_NAMES.get(feature.name, feature.name))}")
    left = escape(TARGET_NAMES.get(name, name).lower())
    return f"{left} = {' + '.join(terms)}"


def _numbers(target: TargetSnapshot) -> str:
    model = target.models.get(target.champion)
    cells: list[tuple[str, str]] = []
    if model is not None:
        cells += [("rows", count(model.rows)), ("effective rows", count(model.effective_rows))]
        error = target.prediction_error
        if error is not None:
            cells += [("median error", percent(error.median_ape)), ("p90 error", percent(error.p90_ape))]
        if target.shape_factors and model.error is not None:
            cells.append(("median error of coefficients alone", percent(model.error.median_ape)))
        cells += _of_now(target)
    if target.interval is not None:
        cells.append(("observed ÷ predicted", f"{factor(target.interval.p10)} – {factor(target.interval.p90)}"))
    if target.drift is not None:
        gain = "" if target.drift.gain is None else f" (last ×{factor(target.drift.gain)})"
        cells.append(("changes of speed", f"{target.drift.count}{gain}"))
    return '<dl class="numbers">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in cells) + "</dl>"


def _of_now(target: TargetSnapshot) -> list[tuple[str, str]]:
    """What the last rows do to the prediction, and the error of what a reader of a file computes."""
    cells = []
    for phase, level in target.level.items():
        memory = "no level" if level.half_life_rows is None else f"half-life {level.half_life_rows} rows"
        cells.append((f"level, {escape(PHASE_NAMES.get(phase, phase))}", f"×{factor(level.factor)} ({memory})"))
    if (correction := target.correction) is not None:
        does = f"×{factor(correction.factor)} on the last row" if correction.active else "off: it would not help"
        cells.append((f"correction ({escape(correction.learner)})", does))
    portable = target.models.get("portable")
    if portable is not None and portable.shaped_error is not None:
        cells.append(("median error without these", percent(portable.shaped_error.median_ape)))
    return cells


def _coefficients(name: str, model: ModelSnapshot, config_id: str) -> str:
    limit = _axis_limit(model.features)
    rows = "".join(_coefficient_row(feature, limit) for feature in model.features)
    caption = escape(f"Coefficients of {TARGET_NAMES.get(name, name)}, portable set, {config_id}")
    scale = f'<span class="scale"><span>−{percent(limit)}</span><span>+{percent(limit)}</span></span>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table class="coefficients">'
        f'<caption class="sr">{caption}</caption><thead><tr><th scope="col">feature</th>'
        f'<th scope="col" class="num">coefficient</th><th scope="col" class="num">± std. error</th>'
        f'<th scope="col" class="chart">95 % interval {scale}</th>'
        f'<th scope="col">status</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _axis_limit(features: list[FeatureSnapshot]) -> float:
    largest = 0.02
    for feature in features:
        if feature.coefficient:
            largest = max(largest, Z_95 * abs((feature.stderr or 0.0) / feature.coefficient))
    return min(nice_limit(largest), MAX_AXIS)


def _coefficient_row(feature: FeatureSnapshot, limit: float) -> str:
    value, stderr = feature.coefficient, feature.stderr
    chart = '<span class="quiet">no relative scale at 0</span>'
    if value:
        chart = whisker(None if stderr is None else stderr / value, limit)
    status = escape(feature.status)
    meaning = escape(_why(feature))
    return (
        f'<tr><th scope="row">{escape(feature.name).replace("_", "_<wbr>")}</th>'
        f'<td class="num">{escape(coefficient(value, feature.unit))}</td>'
        f'<td class="num">{"–" if stderr is None else escape(coefficient(stderr, feature.unit).split("/")[0])}</td>'
        f'<td class="chart">{chart}</td>'
        f'<td><span class="status {status}">{status.replace("_", " ")}</span> '
        f'<span class="quiet why">{meaning}</span></td></tr>'
    )


def _why(feature: FeatureSnapshot) -> str:
    """What stands behind a status, where it is not plainly identified."""
    if feature.reason is not None:
        return REASONS[feature.reason]
    return "" if feature.status == "identified" else STATUS.get(feature.status, "")


def _shape_factors(target: TargetSnapshot, config_id: str) -> str:
    """The batch shapes with the most rows, and what each takes per time by the coefficients."""
    if not target.shape_factors:
        return ""
    shown = sorted(target.shape_factors.items(), key=lambda item: (-item[1].rows, item[0]))[:MAX_SHAPES]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="num">×{factor(each.factor)}</td>'
        f'<td class="num">{count(int(each.rows))}</td></tr>'
        for name, each in shown
    )
    summary = f"Shape factors of {len(target.shape_factors)} batch shapes"
    caption = f"A step takes the sum of the coefficients times this; the {len(shown)} shapes with the most rows, any "
    if not target.shape_factors_applied:
        summary += ", not applied: they would predict worse than none"
    return (
        f'<details class="more" id="shapes-{escape(config_id)}"><summary>{summary}</summary>'
        f'<table class="models"><caption>{caption}other: ×1</caption>'
        '<thead><tr><th scope="col">batch shape</th><th scope="col" class="num">factor</th>'
        f'<th scope="col" class="num">rows</th></tr></thead><tbody>{rows}</tbody></table></details>'
    )


def _identity(config: ConfigSnapshot) -> str:
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in sorted(config.config.items()))
    engines = "".join(
        f"<li><code>{escape(e.instance)}</code> {escape(e.scheduling)}, last step {count(e.last_step)}</li>"
        for e in config.engines[:32]
    )
    key = f"identity-{escape(config.config_id)}"
    body = f'<dl class="numbers">{cells}</dl><ul>{engines}</ul>'
    return f'<details class="identity" id="{key}"><summary>Configuration and engines</summary>{body}</details>'


MAX_OVERVIEW = 200
MAX_DETAILS = 6
"""More configurations than this are in the overview only; their links open them one by one."""


def choose(configs: Sequence[ConfigSnapshot], query: Mapping[str, str]) -> tuple[str, Sequence[ConfigSnapshot]]:
    """The id of the only one that the page's address opens, empty without such a wish, and those that are opened."""
    chosen = [config for config in configs if config.config_id == query.get("config")]
    return (chosen[0].config_id, chosen) if chosen else ("", configs[:MAX_DETAILS])


def learned_rows(config: ConfigSnapshot) -> int:
    """Rows of all targets."""
    return sum(max((model.rows for model in target.models.values()), default=0) for target in config.targets.values())


def overview(configs: Sequence[ConfigSnapshot], chosen: str) -> str:
    """The section of the page; empty of a single configuration. ``chosen``: id of the only one that is opened."""
    if len(configs) == 1:
        return ""
    shown = told_apart_of(configs, configs[:MAX_OVERVIEW])
    rows = "".join(_overview_row(config, chosen, apart) for config, apart in shown)
    hidden = len(configs) - MAX_OVERVIEW
    more = f'<p class="quiet">{hidden} more in <a href="/snapshot">/snapshot</a>.</p>' if hidden > 0 else ""
    back = f'<p><a href="/">All {count(len(configs))} configurations</a></p>' if chosen else ""
    return (
        '<section id="overview" aria-labelledby="overview-title" data-live><h2 id="overview-title">Configurations</h2>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of configurations"><table class="overview">'
        '<thead><tr><th scope="col">model</th><th scope="col">facts</th><th scope="col">telemetry</th>'
        '<th scope="col" class="num">rows</th><th scope="col" class="num">step error</th><th scope="col">id</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}{back}</section>"
    )


def told_apart_of(
    configs: Sequence[ConfigSnapshot], shown: Sequence[ConfigSnapshot]
) -> Iterator[tuple[ConfigSnapshot, tuple[str, ...]]]:
    """What tells each that is shown from all others, and since when it is silent."""
    heard = [each.last_heard_unix_nano for each in configs]
    replaced = [bool(each.replaced_by) for each in configs]
    apart = told_apart([(each.config_id, each.config) for each in configs], heard, replaced)
    by_id = {each.config_id: words for each, words in zip(configs, apart, strict=True)}
    yield from ((each, by_id[each.config_id]) for each in shown)


def _overview_row(config: ConfigSnapshot, chosen: str, apart: Sequence[str]) -> str:
    step = config.targets.get("step_time")
    error = None if step is None else step.prediction_error
    name = escape(config.config_id)
    facts = escape(" · ".join(filter(None, (config_facts(config), *apart))))
    current = ' aria-current="true"' if config.config_id == chosen else ""
    return (
        f'<tr{current}><th scope="row"><a href="/?config={name}">{escape(config_title(config))}</a></th>'
        f"<td>{facts}</td><td>{escape(config.telemetry)}</td>"
        f'<td class="num">{count(learned_rows(config))}</td>'
        f'<td class="num">{"–" if error is None else percent(error.median_ape)}</td><td><code>{name}</code></td></tr>'
    )
