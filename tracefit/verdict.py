"""The verdict on one configuration: whether its numbers may be used, how good they are, and what changed.

Page, metrics, log and commands read it and decide nothing of their own, so that all of them say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .document import ConfigDocument, Model, Ratios, SpeedChange
from .selection import SILENT_NS
from .step_model import STEP_TIME

_TELEMETRY_GAPS = {
    "sampled": "steps are sampled, and those between are rebuilt from request journeys",
    "journeys": "the batch of each step is rebuilt from request journeys",
    "requests": "one span per request and no steps",
    "metrics": "means of many steps, from pages of counters",
}
_PREFIX_HITS = "prefix-cache hits are hidden: a prompt token costs the mean of cached and computed ones"


class Problem(NamedTuple):
    """Something to look at, in one clause; ``is_defect``: something failed, and waiting does not mend it."""

    text: str
    is_defect: bool = False


class Verdict(NamedTuple):
    """What is to be thought of one configuration, as of one snapshot.

    Attributes:
        usable: its predictions may be used where something was seen.
        reasons: why not, one clause each; empty if they may.
        doubts: those of the reasons that more rows do not mend.
        quarantined: why its learner was put aside; empty if it was not.
        error: median relative error of the predictions that a reader of the snapshot computes; None before the first.
        rows: rows behind the coefficients of the step time.
        last_row_unix_nano: when the newest step that was learned from ended, 0 where nobody said.
        last_heard_unix_nano: when the newest telemetry of its engines was made, 0 where nobody said.
        replaced: its server sends another configuration now.
        change: the newest confirmed change of the speed of its steps.
        seen: lowest and highest value per step of each feature that was learned from.
        hidden: what its telemetry samples or does not tell, one clause each.
    """

    usable: bool
    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    quarantined: str = ""
    error: float | None = None
    rows: int = 0
    last_row_unix_nano: int = 0
    last_heard_unix_nano: int = 0
    replaced: bool = False
    change: SpeedChange | None = None
    seen: Mapping[str, Ratios] = {}
    hidden: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``usable``, ``not usable yet``, ``not usable`` or ``put aside``."""
        if self.quarantined:
            return "put aside"
        if self.usable:
            return "usable"
        return "not usable" if self.doubts else "not usable yet"

    def to_dict(self) -> dict[str, object]:
        """For JSON: the same keys, and ``state``."""
        change = None if self.change is None else self.change._asdict()
        seen = {name: list(bounds) for name, bounds in self.seen.items()}
        return {"state": self.state, **self._asdict(), "change": change, "seen": seen}

    def silent_since(self, now_unix_nano: int) -> int:
        """When its engines were last heard of, if they are gone: replaced, or silent for ten minutes. Else 0."""
        is_gone = self.replaced or now_unix_nano - self.last_heard_unix_nano > SILENT_NS
        return self.last_heard_unix_nano if is_gone else 0

    def problems(self, now_unix_nano: int) -> tuple[Problem, ...]:
        """What a person should hear first: what failed, what is in doubt, what changed within a day."""
        problems = [Problem("put aside, its learner failed", is_defect=True)] if self.quarantined else []
        problems += [Problem(f"not usable: {doubt}", is_defect=True) for doubt in self.doubts]
        if self.change is not None and self.change.is_news(now_unix_nano) and not self.replaced:
            problems.append(Problem(self.change.text(now_unix_nano)))
        return tuple(problems)


def judged(config: ConfigDocument, reasons: tuple[str, ...], model: Model | None) -> Verdict:
    """The verdict; ``model`` predicts its steps, and ``reasons`` speak against it."""
    step = config.targets.get(STEP_TIME)
    hidden = (
        _TELEMETRY_GAPS.get(config.telemetry, ""),
        _PREFIX_HITS if config.prefix_hits_hidden else "",
    )
    levels = () if step is None else step.level.values()
    return Verdict(
        usable=not reasons,
        reasons=reasons,
        doubts=config.doubts,
        quarantined=config.quarantined,
        error=None if model is None else model.median_ape,
        rows=0 if model is None else model.rows,
        last_row_unix_nano=max((level.last_row_unix_nano for level in levels), default=0),
        last_heard_unix_nano=config.last_heard_unix_nano,
        replaced=config.replaced,
        change=None if step is None else step.change,
        seen={} if step is None or step.seen is None else step.seen.features,
        hidden=tuple(filter(None, hidden)),
    )
