"""One configuration as HTML: what it is, its coefficients, its error, what would help."""

from __future__ import annotations

from online import ConfigSnapshot, FeatureSnapshot, ModelSnapshot, TargetSnapshot

from .advice import STATUS, Advice, advice_for
from .charts import Z_95, calibration_chart, error_chart, nice_limit, whisker
from .history import History
from .merged_engines import replicas_table
from .models import models_in_competition
from .text import FEATURE_NAMES, TARGET_NAMES, coefficient, count, duration, escape, factor, percent

MAX_STRATA = 12
MAX_SHAPES = 16
MAX_AXIS = 0.5
"""Beyond half of the coefficient an error bar or a live value is drawn at the edge; the numbers stand beside."""
MIXTURE_VIF = 10.0
"""Variance inflation beyond which a feature is nearly a mixture of the others (online/rls/identify.py)."""

MOSTLY_PRIOR = 0.5

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


def config_section(config: ConfigSnapshot, history: History) -> str:
    """Everything about one configuration."""
    name = escape(config.config_id)
    parts = [
        f'<section class="config" id="config-{name}" aria-labelledby="title-{name}" data-live>',
        f'<header><h2 id="title-{name}">{escape(config_title(config))}</h2>',
        f'<p class="facts">{escape(config_facts(config)) or "no facts known"} <code>{name}</code></p>',
        _links(name),
        "</header>",
        _advice(config),
    ]
    step = config.targets.get("step_time")
    if step is not None:
        parts.append(_target("step_time", step, config, history))
    order = list(TARGET_NAMES)
    others = sorted(set(config.targets) - {"step_time"}, key=lambda name: _place(order, name))
    parts += [_target(name, config.targets[name], config, history) for name in others]
    parts.append(_identity(config))
    parts.append("</section>")
    return "".join(parts)


def _place(order: list[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def _links(name: str) -> str:
    return (
        f'<nav class="links" aria-label="Downloads of configuration {name}">'
        f'<a href="/snapshot/{name}">JSON</a> <a href="/snapshot/{name}/blis.yaml">BLIS file</a> '
        f'<a href="/snapshot/{name}/blis.yaml?format=flags">BLIS flags</a></nav>'
    )


def _advice(config: ConfigSnapshot) -> str:
    first, *others = advice_for(config)
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


def _target(name: str, target: TargetSnapshot, config: ConfigSnapshot, history: History) -> str:
    model = target.models.get("portable") or target.models.get(target.champion)
    if model is None:
        return ""
    title = escape(TARGET_NAMES.get(name, name))
    course = history.course(config.config_id, name)
    charts = ""
    if name == "step_time":
        error = f"<figure><figcaption>Error of predictions, before learning from them</figcaption>{error_chart(course)}"
        charts = f'<div class="charts">{error}</figure>{_calibration(target)}</div>'
    body = (
        f'<p class="equation" aria-label="Equation">{_equation(name, model)}</p>{_numbers(target)}'
        f"{_coefficients(name, model)}{charts}{_shape_factors(target)}"
        f"{replicas_table(target, config.told_apart_by)}{models_in_competition(target)}"
    )
    summary = f'<h3>{title}</h3><span class="vector">{escape(target.vector)}</span>{_headline(target)}'
    key = f"target-{escape(config.config_id)}-{escape(name)}"
    opened = " open" if name == "step_time" else ""
    return f'<details class="target" id="{key}"{opened}><summary>{summary}</summary>{body}</details>'


def _headline(target: TargetSnapshot) -> str:
    words = []
    if target.mean_us is not None:
        words.append(f"mean over all {duration(target.mean_us)}")
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
        cells += _correction(target)
    if target.interval is not None:
        cells.append(("observed ÷ predicted", f"{factor(target.interval.p10)} – {factor(target.interval.p90)}"))
    if target.drift is not None:
        gain = "" if target.drift.gain is None else f" (last ×{factor(target.drift.gain)})"
        cells.append(("changes of speed", f"{target.drift.count}{gain}"))
    return '<dl class="numbers">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in cells) + "</dl>"


def _correction(target: TargetSnapshot) -> list[tuple[str, str]]:
    """What a learner does to the prediction, and the error of what a reader of the snapshot can compute."""
    if target.correction is None:
        return []
    does = (
        f"×{factor(target.correction.factor)} on the last rows"
        if target.correction.active
        else "off: it would not help"
    )
    cells = [(f"correction ({escape(target.correction.learner)})", does)]
    portable = target.models.get("portable")
    if portable is not None and portable.shaped_error is not None:
        cells.append(("median error without it", percent(portable.shaped_error.median_ape)))
    return cells


def _coefficients(name: str, model: ModelSnapshot) -> str:
    limit = _axis_limit(model.features)
    suspected = any(feature.live_coefficient is not None for feature in model.features)
    rows = "".join(_coefficient_row(feature, limit, live=suspected) for feature in model.features)
    live = '<th scope="col" class="num">live: fast, noisy</th>' if suspected else ""
    caption = escape(f"Coefficients of {TARGET_NAMES.get(name, name)}, portable set")
    scale = f'<span class="scale"><span>−{percent(limit)}</span><span>+{percent(limit)}</span></span>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table class="coefficients">'
        f'<caption class="sr">{caption}</caption><thead><tr><th scope="col">feature</th>'
        f'<th scope="col" class="num">coefficient</th><th scope="col" class="num">± std. error</th>'
        f'{live}<th scope="col" class="chart">95 % interval{", live ◇" if suspected else ""} {scale}</th>'
        f'<th scope="col">status</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _axis_limit(features: list[FeatureSnapshot]) -> float:
    largest = 0.02
    for feature in features:
        if feature.coefficient:
            largest = max(largest, Z_95 * abs((feature.stderr or 0.0) / feature.coefficient))
            if feature.live_coefficient is not None:
                largest = max(largest, abs(feature.live_coefficient / feature.coefficient - 1))
    return min(nice_limit(largest), MAX_AXIS)


def _coefficient_row(feature: FeatureSnapshot, limit: float, *, live: bool) -> str:
    """``live``: with a column of what the fast member has, as while a change of speed is suspected."""
    value, stderr, now = feature.coefficient, feature.stderr, feature.live_coefficient
    chart = '<span class="quiet">no relative scale at 0</span>'
    if value:
        relative_live = None if now is None else now / value - 1
        chart = whisker(None if stderr is None else stderr / value, relative_live, limit)
    latest = f'<td class="num">{"–" if now is None else escape(coefficient(now, feature.unit).split("/")[0])}</td>'
    status = escape(feature.status)
    meaning = escape(_why(feature))
    return (
        f'<tr><th scope="row">{escape(feature.name)}</th>'
        f'<td class="num">{escape(coefficient(value, feature.unit))}</td>'
        f'<td class="num">{"–" if stderr is None else escape(coefficient(stderr, feature.unit).split("/")[0])}</td>'
        f"{latest if live else ''}"
        f'<td class="chart">{chart}</td>'
        f'<td><span class="status {status}">{status.replace("_", " ")}</span> '
        f'<span class="quiet why">{meaning}</span></td></tr>'
    )


def _why(feature: FeatureSnapshot) -> str:
    """What stands behind a status, where it is not plainly identified."""
    if feature.status == "identified":
        return ""
    if feature.status == "weak" and feature.vif is not None and feature.vif > MIXTURE_VIF:
        return f"moves together with the other features (VIF {feature.vif:.0f}); vary the load"
    if feature.status == "weak" and feature.learned_share is not None and feature.learned_share < MOSTLY_PRIOR:
        return f"still mostly a prior ({percent(feature.learned_share)} learned)"
    return STATUS.get(feature.status, "")


def _stratum_order(name: str) -> tuple[str, int]:
    """``decode:2-3`` before ``decode:16-31``."""
    kind, _, requests = name.partition(":")
    first = requests.partition("-")[0]
    return kind, int(first) if first.isdecimal() else 0


def _calibration(target: TargetSnapshot) -> str:
    interval = target.interval
    if interval is None:
        return ""
    rows = [
        ("all", (interval.p10, interval.p50, interval.p90)),
        *((name, interval.strata[name]) for name in sorted(interval.strata, key=_stratum_order)[:MAX_STRATA]),
    ]
    chart = calibration_chart(rows)
    return f"<figure><figcaption>Observed ÷ predicted, by operating point</figcaption>{chart}</figure>"


def _shape_factors(target: TargetSnapshot) -> str:
    """The batch shapes with the most rows, and what each takes per time by the coefficients."""
    if not target.shape_factors:
        return ""
    shown = sorted(target.shape_factors.items(), key=lambda item: (-item[1].rows, item[0]))[:MAX_SHAPES]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="num">×{factor(each.factor)}</td>'
        f'<td class="num">{count(int(each.rows))}</td></tr>'
        for name, each in shown
    )
    caption = f"Shape factors: a step takes the sum of the coefficients times this ({len(shown)} of "
    return (
        f'<table class="models"><caption>{caption}{len(target.shape_factors)} batch shapes; any other: ×1)</caption>'
        '<thead><tr><th scope="col">batch shape</th><th scope="col" class="num">factor</th>'
        f'<th scope="col" class="num">rows</th></tr></thead><tbody>{rows}</tbody></table>'
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
