"""A configuration as the page shows it: its verdict, three figures, its formula, coefficients and pictures.

Whether it may be used, what changed and who is silent is read from the verdict of the client, and nowhere else. What
is made here are the values; ``templates/config.html.j2`` words them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from exporters.blis import BlisError, blis_coefficients
from exporters.charts import courses, scatter, step_shares
from exporters.what_if import LoadView
from exporters.wording import REPLICAS_SHOWN, TARGETS, Z_95, Advice, advice_for
from online import ConfigSnapshot, HistoryView, ModelSnapshot, ReplicaSnapshot, Snapshot, TargetSnapshot
from tracefit import Verdict

View = dict[str, Any]
"""What a template lays out."""

STEP_TIME = "step_time"
MAX_ENGINES = 32
_MERGED = "merged"
_TITLE_FACTS = {"gpu": "", "tensor_parallel_size": "TP ", "quantization": "", "vllm_version": "vLLM "}


class Judged(NamedTuple):
    """A configuration with the verdict on it, its load, and what tells it from others."""

    config: ConfigSnapshot
    load: LoadView | None
    verdict: Verdict
    apart: tuple[str, ...]

    @property
    def title(self) -> str:
        """What people call it: the model, or who sends."""
        model, engines = self.config.config.get("model"), self.config.engines
        if model:
            return str(model)
        return f"unknown model at {engines[0].instance}" if engines else "unknown model"

    @property
    def facts(self) -> str:
        """The few facts that tell configurations apart."""
        known = ((before, self.config.config.get(key)) for key, before in _TITLE_FACTS.items())
        return " · ".join((*(f"{before}{value}" for before, value in known if value not in {None, ""}), *self.apart))

    @property
    def step(self) -> TargetSnapshot | None:
        """The time of its steps."""
        return self.config.targets.get(STEP_TIME)

    @property
    def tone(self) -> str:
        """``ok``, ``fair`` or ``bad``."""
        verdict = self.verdict
        return "bad" if verdict.quarantined or verdict.doubts else "ok" if verdict.usable else "fair"

    @property
    def emitters(self) -> str:
        """Who sends: engines and their scheduling, or the engines whose states were merged."""
        engines = self.config.engines
        if self.config.telemetry == _MERGED and self.step is not None and self.step.replicas:
            return f"{len(self.step.replicas)} engines merged"
        modes = ", ".join(sorted({engine.scheduling for engine in engines}))
        number = f"{len(engines)} {'engine' if len(engines) == 1 else 'engines'}"
        return f"{number}, {modes} scheduling" if modes else number

    def rank(self, now: int) -> tuple[bool, bool, int]:
        """To sort by: configurations in trouble first, silent ones last, else by rows."""
        verdict = self.verdict
        return not verdict.problems(now), bool(verdict.silent_since(now)), -verdict.rows


class PageView(NamedTuple):
    """What all configurations of a page share: when this process began, its port, and histories by id."""

    started_unix_nano: int
    otlp_port: int
    history_of: Callable[[str], HistoryView | None]


def config_view(judged: Judged, page: PageView, given: set[Advice]) -> View:
    """One configuration in detail; of the advice, what was not ``given`` above."""
    config, history = judged.config, page.history_of(judged.config.config_id)
    model = None if judged.step is None else _shown_model(judged.step)
    order = [name for name in TARGETS if name in config.targets]
    others = [name for name in (*order, *sorted(config.targets.keys() - order)) if name != STEP_TIME]
    views = (_target_view(name, config.targets[name], config) for name in others)
    advice = [each.for_port(page.otlp_port) for each in advice_for(config)]
    new = [each for each in advice if each not in given and each.level != "good"]
    given.update(advice)
    over_time = [] if model is None else courses(model, history, page.started_unix_nano)
    return {
        "judged": judged,
        "model": model,
        "reasons": judged.verdict.reasons if not config.quarantined else (),
        "advice": [] if config.quarantined else new,
        "step": None if judged.step is None else _target_view(STEP_TIME, judged.step, config),
        "others": [view for view in views if view is not None],
        "shares": [] if judged.step is None or model is None else step_shares(judged.step, model),
        "courses": bool(over_time),
        "pictures": [figure for figure in (scatter(history), *over_time) if figure is not None],
        "nothing_learned": not config.targets and not config.quarantined,
        "blis_error": _blis_error(config),
        "known": sorted((str(key), str(value)) for key, value in config.config.items()),
        "engines": config.engines[:MAX_ENGINES],
    }


def overview_view(snapshot: Snapshot, judged: Sequence[Judged], chosen: Sequence[Judged]) -> View | None:
    """The table of configurations; None of a single one."""
    if len(snapshot.configs) == 1:
        return None
    hidden = len(snapshot.configs) - len(judged)
    return {"rows": judged, "chosen": chosen, "hidden": hidden, "all": len(snapshot.configs) if chosen else 0}


def _shown_model(target: TargetSnapshot) -> ModelSnapshot | None:
    return target.models.get("portable") or target.models.get(target.champion)


def _target_view(name: str, target: TargetSnapshot, config: ConfigSnapshot) -> View | None:
    model = _shown_model(target)
    if model is None:
        return None
    title, meaning = TARGETS.get(name, (name, ""))
    return {
        "key": f"target-{config.config_id}-{name}",
        "name": title,
        "meaning": meaning,
        "target": target,
        "model": model,
        "caption": f"Coefficients of {title}, portable set, {config.config_id}",
        "replicas": target.replicas[:REPLICAS_SHOWN],
        "differing": sum(each.differs for each in target.replicas),
        "told_apart_by": config.told_apart_by,
    }


def replica_ratio(replica: ReplicaSnapshot) -> str:
    """An engine's time by that of its siblings, with the 95 % interval."""
    if replica.ratio is None:
        return "–"
    error = "" if replica.stderr is None else f" ± {Z_95 * replica.stderr:.3f}"
    return f"×{replica.ratio:.3f}{error}"


def _blis_error(config: ConfigSnapshot) -> str:
    """Why BLIS cannot have a file of it; empty where it can."""
    try:
        blis_coefficients(config)
    except BlisError as error:
        return str(error)
    return ""
