"""A configuration as the page shows it: its verdict, three figures, its formula, coefficients and pictures.

Whether it may be used, what changed and who is silent is read from the verdict of the client, and nowhere else. What
is made here are the values; ``templates/config.html.j2`` words them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from exporters.blis import BlisError, blis_coefficients
from exporters.charts import courses, scatter, step_shares
from exporters.what_if import LoadView
from exporters.wording import STEP_TIME, TARGETS, Advice, advice_for, name_of
from online import ConfigSnapshot, HistoryView, ModelSnapshot, TargetSnapshot
from tracefit import Verdict

View = dict[str, Any]
"""What a template lays out."""

_TITLE_FACTS = {"gpu": "", "tensor_parallel_size": "TP ", "quantization": "", "vllm_version": "vLLM "}


class ConfigVerdict(NamedTuple):
    """A configuration with its load, the verdict on it, and what differs from others."""

    config: ConfigSnapshot
    load: LoadView
    apart: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The client's."""
        return self.load.verdict

    @property
    def title(self) -> str:
        """What people call it."""
        return name_of(self.config)

    @property
    def facts(self) -> str:
        """The few facts in which configurations differ."""
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

    def rank(self, now: int) -> tuple[bool, bool, int]:
        """To sort by: those with problems first, those that are silent last, else by rows."""
        verdict = self.verdict
        return not verdict.problems(now), bool(verdict.silent_since(now)), -verdict.rows


class TargetView(NamedTuple):
    """One target of a configuration, as people call it, and the model that is shown of it."""

    name: str
    title: str
    meaning: str
    target: TargetSnapshot
    model: ModelSnapshot


def config_view(judged: ConfigVerdict, given: set[Advice], otlp_port: int, history: HistoryView | None) -> View:
    """One configuration in detail; of the advice, what was not ``given`` above."""
    config = judged.config
    views = [
        TargetView(name, *words, target, model)
        for name, words in TARGETS.items()
        if (target := config.targets.get(name))
        and (model := target.models.get("portable") or target.models.get(target.champion))
    ]
    step = next((view for view in views if view.name == STEP_TIME), None)
    advice = [each.for_port(otlp_port) for each in advice_for(config)]
    new = [each for each in advice if each not in given and each.level != "good"]
    given.update(advice)
    return {
        "judged": judged,
        "advice": [] if config.quarantined else new,
        "step": step,
        "others": [view for view in views if view is not step],
        "shares": [] if step is None else step_shares(step.target, step.model),
        "scatter": scatter(history),
        "courses": [] if step is None else courses(step.model, history),
        "blis_error": _blis_error(config),
    }


def _blis_error(config: ConfigSnapshot) -> str:
    """Why BLIS cannot have a file of it; empty where it can."""
    try:
        blis_coefficients(config)
    except BlisError as error:
        return str(error)
    return ""
